#!/usr/bin/env python3
"""Convert language model checkpoints for run.c: to GGUF, or to llama2.c's .bin and tokenizer.bin.

    python export.py model.gguf --hf DIR --type q8_0     a Hugging Face folder
    python export.py model.bin --hf DIR --version 2      as int8 .bin, and model.tokenizer.bin
    python export.py tokenizer.bin --tokenizer FILE      a tokenizer alone

Needs numpy and gguf; safetensors for Hugging Face weights, sentencepiece and protobuf for a
tokenizer.model, torch for .pt and .pth files. Each is imported only when it is used.
"""
import argparse
import base64
import contextlib
import functools
import itertools
import json
import math
import os
import re
import struct
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path


class ExportError(Exception):
    """Something the user can act on; printed as one line, exit status 1."""


def package(name):
    """Import a package or say in one line how to get it."""
    try:
        return __import__(name, fromlist=["_"])
    except ImportError as e:
        what = "protobuf" if "google" in str(e) else name.split(".")[0]
        raise ExportError(f"the Python package {what} is needed here: pip install {what}") from None


@contextlib.contextmanager
def parsing(path):
    """A file whose values have unexpected types is an error of that file, not of this program."""
    try:
        yield
    except KeyError as e:
        raise ExportError(f"{path}: {e.args[0]} is missing") from None
    except (TypeError, AttributeError, ValueError, IndexError, ArithmeticError, re.error,
            struct.error) as e:
        raise ExportError(f"{path}: unexpected content: {type(e).__name__} {one_line(e)}") from None


def one_line(e):
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]


def listing(names):
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class Log:
    """Remarks and progress go to stderr; progress only where somebody is watching."""
    quiet = False

    def note(self, text):
        if not self.quiet:
            print(f"export.py: {text}", file=sys.stderr)

    def progress(self, done, total, name):
        if not self.quiet and sys.stderr.isatty():
            line = f"{100 * done // total:3d}%  {name}".ljust(60)
            print("\r" + line, end="\n" if done == total else "", file=sys.stderr, flush=True)


log = Log()


# ---- What a model is ----------------------------------------------------------------------------
#
# A new architecture is one row of ARCHS, and a list of its layer's tensors where those differ.
# Tensors: GGUF name, Hugging Face name, shape (experts, rows, columns), setting that gives a bias.

OUTER = [
    ("token_embd", "embed_tokens", "vocab dim", ""),
    ("output_norm", "norm", "dim", ""),
    ("output", "lm_head", "vocab dim", ""),
]
ATTENTION = [
    ("attn_q", "self_attn.q_proj", "q dim", "qkv_bias"),
    ("attn_k", "self_attn.k_proj", "kv dim", "qkv_bias"),
    ("attn_v", "self_attn.v_proj", "kv dim", "qkv_bias"),
    ("attn_output", "self_attn.o_proj", "dim q", "attention_bias"),
]
MLP = [
    ("ffn_gate", "mlp.gate_proj", "hidden dim", "mlp_bias"),
    ("ffn_up", "mlp.up_proj", "hidden dim", "mlp_bias"),
    ("ffn_down", "mlp.down_proj", "dim hidden", "mlp_bias"),
]
EXPERTS = [
    ("ffn_gate_inp", "mlp.gate", "experts dim", "expert_bias"),
    ("ffn_gate_exps", "mlp.experts.gate_proj", "experts narrow dim", "expert_bias"),
    ("ffn_up_exps", "mlp.experts.up_proj", "experts narrow dim", "expert_bias"),
    ("ffn_down_exps", "mlp.experts.down_proj", "experts dim narrow", "expert_bias"),
]
SHARED = [      # an expert that every token has
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj", "shared dim", ""),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj", "shared dim", ""),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj", "dim shared", ""),
]
SHARED_GATE = [("ffn_gate_inp_shexp", "mlp.shared_expert_gate", "one dim", "")]
PRE_NORMS = [
    ("attn_norm", "input_layernorm", "dim", ""),
    ("ffn_norm", "post_attention_layernorm", "dim", ""),
]
POST_NORMS = [      # on what a branch gives, before it is added
    ("post_attention_norm", "post_attention_layernorm", "dim", ""),
    ("post_ffw_norm", "post_feedforward_layernorm", "dim", ""),
]
BOTH_NORMS = [PRE_NORMS[0], ("ffn_norm", "pre_feedforward_layernorm", "dim", ""), *POST_NORMS]
HEAD_NORMS = [      # of each head's queries and keys
    ("attn_q_norm", "self_attn.q_norm", "head", ""),
    ("attn_k_norm", "self_attn.k_norm", "head", ""),
]
WIDE_NORMS = [("attn_q_norm", "self_attn.q_norm", "q", ""),     # of all heads at once
              ("attn_k_norm", "self_attn.k_norm", "kv", "")]
LLAMA = PRE_NORMS + ATTENTION + MLP
PHI3 = PRE_NORMS + [
    ("attn_qkv", "self_attn.qkv_proj", "qkv dim", ""), ATTENTION[3],
    ("ffn_up", "mlp.gate_up_proj", "both dim", ""), MLP[2],     # the gate's rows come first
]
GPT_OSS = [PRE_NORMS[0], POST_NORMS[0], ("attn_sinks", "self_attn.sinks", "heads", ""),
           *ATTENTION, *EXPERTS]

# Does layer i see a window only? For an empty config: what readers of a GGUF with a window assume.
def all_slide(i, c): return True
def even_slide(i, c): return i % 2 == 0
def olmo3_slides(i, c): return (i + 1) % 4 != 0
def gemma3_slides(i, c): return (i + 1) % c.get("sliding_window_pattern", 6) != 0
def qwen_slides(i, c): return i >= c.get("max_window_layers", 0)
def qwen2moe_slides(i, c): return not c or i % 2 == 0 and i < c["max_window_layers"]
def smollm3_slides(i, c): return not c or (i + 1) % 4 == 0


@dataclass
class Arch:
    gguf: str                   # general.architecture
    layer: list
    permute: bool = False       # GGUF has rotated pairs side by side, not half a head apart
    slides: object = None       # which layers have the window, None: the class knows no window
    defaults: dict = field(default_factory=dict)    # of transformers, where config.json is silent
    keys: dict = field(default_factory=dict)        # settings copied to the GGUF: name there, type
    act: str = "silu"
    plus_one: bool = False      # norms multiply by 1 + weight; GGUF stores the sum
    local_theta: float = 0.0    # rope base of the layers with a window, where they have their own
    big: int = 0                # with so many layers, scores are divided by sqrt(dim / heads)
    normed: bool = None         # what readers of the GGUF assume for norm_topk_prob
    interleaved: bool = False   # experts stored transposed, rows of gate and up in turn
    truncate: bool = True       # the ends of YaRN's ramp are rounded


QWEN = {"qkv_bias": True, "use_sliding_window": False, "max_window_layers": 28,
        "sliding_window": 4096, "num_key_value_heads": 32}
QWEN3 = {**QWEN, "qkv_bias": None}
GEMMA = {"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4}
GEMMA2 = {**GEMMA, "sliding_window": 4096, "query_pre_attn_scalar": 256}
GEMMA_CAPS = {"attn_logit_softcapping": ("attn_logit_softcapping", float),
              "final_logit_softcapping": ("final_logit_softcapping", float)}
MULTIPLIERS = {"attention_multiplier": ("attention.scale", float),
               "embedding_multiplier": ("embedding_scale", float),
               "residual_multiplier": ("residual_scale", float),
               "logits_scaling": ("logit_scale", float)}
GRANITE = {**dict.fromkeys(MULTIPLIERS, 1.0), "num_local_experts": 8, "num_experts_per_tok": 2}
NARROW = {"moe_intermediate_size": ("expert_feed_forward_length", int)}
YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0}
SHARED_SIZE = ("expert_shared_feed_forward_length", int)
ARCHS = {
    "LlamaForCausalLM": Arch("llama", LLAMA, True),
    "MistralForCausalLM": Arch("llama", LLAMA, True, all_slide, {
        "num_key_value_heads": 8, "sliding_window": 4096}),
    "MixtralForCausalLM": Arch("llama", PRE_NORMS + ATTENTION + EXPERTS, True, all_slide, {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8,
        "num_experts_per_tok": 2}),
    "Ministral3ForCausalLM": Arch("mistral3", LLAMA, True, all_slide, {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "rope_scaling": {**YARN, "factor": 16.0, "original_max_position_embeddings": 16384,
                         "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}),
    "Qwen2ForCausalLM": Arch("qwen2", LLAMA, False, qwen_slides, QWEN),
    "Qwen2MoeForCausalLM": Arch(
        "qwen2moe", PRE_NORMS + ATTENTION + EXPERTS + SHARED + SHARED_GATE, False, qwen2moe_slides,
        {**QWEN, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        {**NARROW, "shared_expert_intermediate_size": SHARED_SIZE}, normed=False),
    "Qwen3ForCausalLM": Arch("qwen3", LLAMA + HEAD_NORMS, False, qwen_slides, {
        **QWEN3, "head_dim": 128}),
    "Qwen3MoeForCausalLM": Arch(
        "qwen3moe", PRE_NORMS + ATTENTION + HEAD_NORMS + EXPERTS, False, all_slide,
        {**QWEN3, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
         "moe_intermediate_size": 768}, NARROW, normed=True),
    "GemmaForCausalLM": Arch("gemma", LLAMA, False, None, {**GEMMA, "num_key_value_heads": 16},
                             act="gelu_pytorch_tanh", plus_one=True),
    "Gemma2ForCausalLM": Arch(
        "gemma2", BOTH_NORMS + ATTENTION + MLP, False, even_slide,
        {**GEMMA2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}, GEMMA_CAPS,
        act="gelu_pytorch_tanh", plus_one=True, big=46),
    "Gemma3ForCausalLM": Arch(
        "gemma3", BOTH_NORMS + HEAD_NORMS + ATTENTION + MLP, False, gemma3_slides,
        {**GEMMA2, "num_attention_heads": 8, "rope_theta": 1e6,
         "max_position_embeddings": 131072}, GEMMA_CAPS,
        act="gelu_pytorch_tanh", plus_one=True, local_theta=1e4, big=62),
    "Phi3ForCausalLM": Arch("phi3", PHI3, False, all_slide, {
        "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}),
    "Olmo2ForCausalLM": Arch("olmo2", POST_NORMS + WIDE_NORMS + ATTENTION + MLP, defaults={
        "rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Arch(
        "olmo2", POST_NORMS + WIDE_NORMS + ATTENTION + MLP, False, olmo3_slides,
        {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096}, local_theta=5e5),
    "GraniteForCausalLM": Arch("granite", LLAMA, True, None, GRANITE, MULTIPLIERS),
    "GraniteMoeForCausalLM": Arch("granitemoe", PRE_NORMS + ATTENTION + EXPERTS, True, None,
                                  GRANITE, MULTIPLIERS),
    "GraniteMoeSharedForCausalLM": Arch(
        "granitemoe", PRE_NORMS + ATTENTION + EXPERTS + SHARED, True, None, GRANITE,
        {**MULTIPLIERS, "shared_intermediate_size": SHARED_SIZE}),
    "SmolLM3ForCausalLM": Arch("smollm3", LLAMA, True, smollm3_slides, {
        "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True,
        "use_sliding_window": False}),
    "GptOssForCausalLM": Arch(
        "gpt-oss", GPT_OSS, False, even_slide,
        {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
         "sliding_window": 128, "attention_bias": True, "expert_bias": True,
         "num_local_experts": 128, "num_experts_per_tok": 4, "rope_scaling": {
             **YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}},
        {"intermediate_size": NARROW["moe_intermediate_size"]}, interleaved=True, truncate=False),
}
GRANITE_DENSE = replace(ARCHS["GraniteForCausalLM"], layer=PRE_NORMS + ATTENTION + [
    (role, name.replace("mlp", "mlp.shared_expert"), *rest) for role, name, *rest in MLP])
EYES = {    # models that see: the text model in them, by its model_type
    "gemma3_text": ARCHS["Gemma3ForCausalLM"], "ministral3": ARCHS["Ministral3ForCausalLM"],
    "mistral": replace(ARCHS["MistralForCausalLM"], gguf="mistral3"),
}


def find_arch(config, where):
    names = config.get("architectures") or f"of type {config.get('model_type')}"
    name = names if isinstance(names, str) else names[0]
    text = config.get("text_config")
    if text and name.endswith("ForConditionalGeneration"):
        name += f" with {text.get('model_type')}"
        arch = EYES.get(text.get("model_type"))
    elif name == "GraniteMoeHybridForCausalLM":     # Granite 4.0; without Mamba it is an older one
        if set(config.get("layer_types") or ["mamba"]) - {"attention", "full_attention"}:
            raise ExportError(f"{where}: Mamba layers of {name} are not supported")
        if config.get("position_embedding_type") != "rope":
            raise ExportError(f"{where}: position_embedding_type is "
                              f"{config.get('position_embedding_type')}, expected rope")
        moe = config.get("num_local_experts", 8)
        arch = ARCHS["GraniteMoeSharedForCausalLM"] if moe else GRANITE_DENSE
    else:
        arch = ARCHS.get(name)
    if not arch:
        raise ExportError(f"{where}: architecture {name} is not supported, known are "
                          + ", ".join(ARCHS))
    return arch


@dataclass
class Params:
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int                  # rows of the embedding
    max_seq_len: int
    norm_eps: float
    n_rot: int                       # elements of a head that rotate
    rope_theta: float = 10000.0
    rope: dict = field(default_factory=lambda: {"rope_type": "default"})    # as in config.json
    tied: bool = False               # the classifier is the embedding
    arch: Arch = None
    config: dict = field(default_factory=dict)      # with the class's defaults
    window: int = 0                  # sliding window of the layers that slide, 0: none
    slides: list = field(default_factory=list)      # for each layer, if there is a window
    local_theta: float = 0.0         # rope base of the layers that slide, 0: no own
    n_experts: int = 0
    narrow: int = 0                  # hidden size of an expert
    shared: int = 0                  # of the shared expert

    OPTIONAL = "window", "local_theta", "n_experts", "narrow", "shared"

    def check(self, where):
        for name, kind in self.__annotations__.items():
            value = getattr(self, name)
            if kind in (int, float) and not (type(value) in (int, kind) and value < 2**31 and (
                    value > 0 or value == 0 and name in self.OPTIONAL)):
                raise ExportError(f"{where}: {name} is {value!r}, expected a positive number")
        if self.n_heads % self.n_kv_heads:
            raise ExportError(f"{where}: {self.n_heads} heads cannot share {self.n_kv_heads} key "
                              "and value heads evenly")
        if self.n_rot % 2 or self.n_rot > self.head_dim:
            raise ExportError(f"{where}: {self.n_rot} of {self.head_dim} elements of a head "
                              "rotate, expected pairs")

    def shape(self, spec):
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        size = {"vocab": self.vocab_size, "dim": self.dim, "hidden": self.hidden_dim, "q": q,
                "kv": kv, "qkv": q + 2 * kv, "both": 2 * self.hidden_dim, "head": self.head_dim,
                "heads": self.n_heads, "experts": self.n_experts, "narrow": self.narrow,
                "shared": self.shared, "one": 1}
        return tuple(size[s] for s in spec.split())


@dataclass
class Tensor:
    shape: tuple        # in the GGUF, the experts first
    sources: dict       # names in the checkpoint -> shapes there
    make: object        # arrays of these names -> array of this shape
    packed: bool = False    # made as bytes of MXFP4


class Model:
    """Parameters and checked access to the weights, one tensor at a time, in GGUF's row order."""

    def __init__(self, params, source, halves):
        """halves: rotated pairs are half a head apart in the source, as Hugging Face has them."""
        self.params, self.source, self.tensors = params, source, {}
        if params.n_layers > len(source.shapes):
            raise ExportError(f"{source.where}: {params.n_layers} layers, but only "
                              f"{len(source.shapes)} tensors")
        rows = [("", "", row) for row in OUTER if row[0] != "output" or not params.tied]
        rows += [(f"blk.{i}.", f"layers.{i}.", row) for i in range(params.n_layers)
                 for row in params.arch.layer]
        permuted = {"attn_q": params.n_heads, "attn_k": params.n_kv_heads}
        for mine, theirs, (role, name, spec, bias) in rows:
            shape = params.shape(spec)
            heads = permuted.get(role, 0) if halves and params.arch.permute else 0
            kinds = {"weight": shape}
            if params.config.get(bias):
                kinds["bias"] = shape[:-1]
            for kind, shape in kinds.items():
                self.tensors[f"{mine}{role}.{kind}"] = self.plan(theirs + name, kind, shape, heads)
        self.check()

    def plan(self, name, kind, shape, heads):
        """How a tensor comes from the checkpoint, which may have the gate and up projections, and
        all experts, in one."""
        import numpy as np
        arch, found = self.params.arch, self.source.shapes
        base, _, part = name.rpartition(".")
        experts, half = base.endswith(".experts"), {"gate_proj": 0, "up_proj": 1}.get(part)
        fused = base + (".down_proj" if half is None else ".gate_up_proj")
        if experts:
            each = {f"{base}.{e}.{part}.{kind}": shape[1:] for e in range(shape[0])}
            if not arch.interleaved and fused not in found:
                return Tensor(shape, each, lambda *x: np.stack(x))
        elif half is None or f"{name}.{kind}" in found or f"{fused}.{kind}" not in found:
            def make(x):
                if heads:   # rows i and i + half of each head become rows 2i and 2i + 1
                    pairs = x.reshape(heads, 2, self.params.head_dim // 2, -1)
                    x = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(shape)
                return x + 1 if arch.plus_one and name.endswith("norm") else x
            return Tensor(shape, {f"{name}.{kind}": shape}, make)
        axis = len(shape) - (2 if kind == "weight" else 1)      # of the rows
        n, whole = shape[axis], list(shape)
        pick, rows = [slice(None)] * len(shape), slice(None)
        if half is not None:
            whole[axis] = 2 * n
            rows = slice(half, None, 2) if arch.interleaved else slice(half * n, half * n + n)
        pick[axis] = rows
        pick = tuple(pick)
        if not experts:
            fused += "." + kind
        elif kind == "bias":
            fused += "_bias"
        elif fused + "_blocks" in found:
            blocks = *whole[:2], whole[2] // 32
            return Tensor(shape, {fused + "_blocks": (*blocks, 16), fused + "_scales": blocks},
                          lambda b, s: mxfp4_blocks(b[:, rows], s[:, rows]), True)
        elif arch.interleaved:
            return Tensor(shape, {fused: (whole[0], whole[2], whole[1])},
                          lambda x: x.swapaxes(1, 2)[pick])
        return Tensor(shape, {fused: tuple(whole)}, lambda x: x[pick])

    def check(self):
        """Every tensor is there once, in the shape that the configuration says, and no other."""
        wanted = dict.fromkeys(name for t in self.tensors.values() for name in t.sources)
        found, where = self.source.shapes, self.source.where
        spare = ("lm_head.weight",) if self.params.tied else ()
        missing = [n for n in wanted if n not in found]
        unknown = [n for n in found     # some GPTQ files give every matrix a bias, of zeros
                   if n not in wanted and n not in spare and not SKIPPED.fullmatch(n)
                   and not (n.endswith(".bias") and not self.source.read(n).any())]
        if missing or unknown:
            raise ExportError(f"{where}: tensor {'missing' if missing else 'unknown'}: "
                              + listing(missing or unknown))
        for t in self.tensors.values():
            for name, shape in t.sources.items():
                if found[name] != shape:
                    raise ExportError(f"{where}: {name} has shape {list(found[name])}, expected "
                                      f"{list(shape)}")
                kind = self.source.dtype(name)
                if (kind == "u8") != t.packed or kind[0] == "i":
                    raise ExportError(f"{where}: {name} has type {kind}, expected "
                                      f"{'u8' if t.packed else 'a float type'}")

    def read(self, name):
        """A tensor of the checkpoint as finite float32, or as bytes."""
        import numpy as np
        x = self.source.read(name)
        if x.dtype == np.uint8:
            return x
        x = np.ascontiguousarray(x, dtype=np.float32)
        if not np.isfinite(x).all():
            at = np.unravel_index(np.argmin(np.isfinite(x)), x.shape)
            raise ExportError(f"{self.source.where}: {name} holds {x[at]} at "
                              f"{[int(i) for i in at]}, expected finite numbers")
        return x

    def load(self, name):
        import numpy as np
        t = self.tensors[name]
        return np.ascontiguousarray(t.make(*map(self.read, t.sources)))


def mxfp4_blocks(blocks, scales):
    """OpenAI's nibbles are in order; a block of GGUF has its exponent first, then byte j with
    elements j and j + 16."""
    import numpy as np
    x = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], 32)
    packed = np.concatenate([scales[..., None], x[..., :16] | x[..., 16:] << 4], -1)
    return packed.reshape(*packed.shape[:-2], -1)


# ---- Weight files -------------------------------------------------------------------------------
#
# A source has where (for messages), shapes {name: tuple}, read(name) -> array, and dtype(name), the
# float type to store it in or, of integers, their own.

# What other checkpoints call the same tensors.
ALIASES = {
    "tok_embeddings": "embed_tokens", "output": "lm_head",                  # Meta, llama2.c
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "feed_forward": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
    "block_sparse_moe": "mlp",                                              # Mixtral, Granite
    "block_sparse_moe.router.layer": "mlp.gate", "mlp.router": "mlp.gate",
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "shared_mlp.input_linear": "mlp.shared_expert.gate_up_proj",
    "shared_mlp.output_linear": "mlp.shared_expert.down_proj",
    "self_attn.sinks": "self_attn.sinks.weight",                            # gpt-oss
}
ALIAS = re.compile(r"(?<![^.])(" + "|".join(
    re.escape(a) for a in sorted(ALIASES, key=len, reverse=True)) + r")(?![^.])")
# Buffers of older checkpoints, which follow from the configuration, and the eyes of a model.
SKIPPED = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|rope\.freqs|freqs_(cos|sin)|"
                     r"(vision_tower|multi_modal_projector)\..*")


def plain_name(name):
    """Hugging Face's name, without the wrappers that frameworks put around a model."""
    name = re.sub(r"^(base_model\.model\.|_orig_mod\.)?(model\.)?(language_model\.)?(model\.)?",
                  "", name)
    name = re.sub(r"(\.experts\.(gate_up|down)_proj)\.weight$", r"\1", name)
    return ALIAS.sub(lambda m: ALIASES[m[0]], name)


class Safetensors:
    TYPES = {"F32": ("<f4", "f32"), "F16": ("<f2", "f16"), "BF16": ("<u2", "bf16"),
             "U8": ("u1", "u8"), "F8_E4M3": ("u1", "bf16"), "F8_E8M0": ("u1", "bf16"),
             "I8": ("i1", "i8"), "I32": ("<i4", "i32"), "I64": ("<i8", "i64")}

    def __init__(self, folder, files):
        self.where, self.shapes, self.info, self.full = str(folder), {}, {}, {}
        library = package("safetensors")
        for path in files:
            try:    # the library proves that offsets and sizes fit the file
                with library.safe_open(path, framework="numpy"), open(path, "rb") as f:
                    size, = struct.unpack("<Q", f.read(8))
                    header = json.loads(f.read(size))
            except library.SafetensorError as e:
                raise ExportError(f"{path}: {one_line(e)}") from None
            header.pop("__metadata__", None)
            for full, info in header.items():
                name = plain_name(full)
                if name in self.info:
                    raise ExportError(f"{path}: tensor {full} is there twice")
                if info["dtype"] not in self.TYPES:
                    raise ExportError(f"{path}: tensor {full} has type {info['dtype']}, expected "
                                      + ", ".join(self.TYPES))
                self.info[name] = path, info["dtype"], 8 + size + info["data_offsets"][0]
                self.shapes[name], self.full[name] = tuple(info["shape"]), full

    def dtype(self, name):
        return self.TYPES[self.info[name][1]][1]

    def read(self, name):
        import numpy as np
        path, kind, offset = self.info[name]
        x = np.fromfile(path, self.TYPES[kind][0], math.prod(self.shapes[name]), offset=offset)
        if kind == "BF16":      # numpy has no bfloat16: it is the upper half of a float32
            x = (x.astype("<u4") << 16).view("<f4")
        elif kind[:2] == "F8":
            x = float8_values(kind)[x]
        return x.reshape(self.shapes[name])


def float8_values(kind):
    """What the 256 bytes mean. E4M3 has no infinity, and one NaN of each sign."""
    import numpy as np
    b = np.arange(256)
    if kind == "F8_E8M0":
        value, bad = np.exp2(b - 127.0), b == 255
    else:
        e, m, bad = b >> 3 & 15, b & 7, b & 127 == 127
        value = np.where(e, m + 8.0, m) * np.exp2(np.maximum(e, 1) - 10.0)
        value = np.where(b < 128, value, -value)
    return np.where(bad, np.nan, value).astype(np.float32)


class Torch:
    """Tensors of torch files; more than one dict are the shards of a model-parallel checkpoint."""

    def __init__(self, where, shards, axes=()):
        self.where, self.shards, self.shapes = str(where), shards, {}
        self.axes = dict(axes)      # name -> axis along which its shards are joined
        for name, t in shards[0].items():
            shape, axis = list(t.shape), self.axes.get(name)
            if axis is not None:
                shape[axis] = sum(s[name].shape[axis] for s in shards)
            self.shapes[name] = tuple(shape)

    def dtype(self, name):
        kind = str(self.shards[0][name].dtype)
        return {"torch.float16": "f16", "torch.bfloat16": "bf16"}.get(kind, "f32")

    def read(self, name):
        import numpy as np
        parts = self.shards if name in self.axes else self.shards[:1]
        arrays = [s[name].detach().float().numpy() for s in parts]
        return np.concatenate(arrays, self.axes.get(name, 0))


def torch_load(path):
    torch = package("torch")
    if not path.is_file():
        raise ExportError(f"{path}: no such file")
    try:    # weights_only: a pickle from a stranger may not run code
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:      # torch raises many kinds for a damaged or foreign file
        raise ExportError(f"{path}: no torch file that can be read safely: {one_line(e)}") from None


def torch_tensors(path, state):
    torch = package("torch")
    if not isinstance(state, dict):
        raise ExportError(f"{path}: holds {type(state).__name__}, expected a dict of tensors")
    return {plain_name(k): v for k, v in state.items() if isinstance(v, torch.Tensor)}


# ---- Quantised weights and adapters -------------------------------------------------------------

class Made:
    """A source in which some tensors are made from those of another, in float32."""

    def __init__(self, source, made, hidden=()):
        self.source, self.made, self.where = source, made, source.where
        self.shapes = {n: s for n, s in source.shapes.items() if n not in hidden}
        self.shapes |= {name: shape for name, (shape, _) in made.items()}

    def dtype(self, name):
        kind = self.source.dtype(name) if name in self.source.shapes else "f16"
        return "f16" if name in self.made and kind[0] == "i" else kind

    def read(self, name):
        import numpy as np
        if name not in self.made:
            return self.source.read(name)
        shape, make = self.made[name]
        with parsing(f"{self.where}: {name}"), np.errstate(all="ignore"):   # found by who reads it
            return make().reshape(shape)


# Methods, the setting that tells their layout, and the layouts known, the usual one first.
QUANTISED = {
    "gptq": ("checkpoint_format", "gptq", "gptq_v2"),
    "awq": ("version", "gemm"),
    "fp8": ("fmt", "e4m3"),
    "compressed-tensors": ("format", "float-quantized", "naive-quantized", "int-quantized",
                           "pack-quantized"),
}
PACKED = {  # integers, zeros, scales and groups of a matrix
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales", "g_idx"),
    "compressed-tensors": ("weight_packed", "weight_zero_point", "weight_scale", "weight_g_idx",
                           "weight_shape"),
}
AWQ_SHIFTS = 0, 16, 4, 20, 8, 24, 12, 28
# Scales of what is multiplied by the weights, which stays in floating point here.
FOR_ACTIVATIONS = re.compile(r".*[._](input|output|activation|[qkv])_(scale|zero_point)")


def fields(words, shifts):
    """The fields at these bits of words of 32 bits: [rows, n] -> [rows, n * len(shifts)]."""
    import numpy as np
    x = words.astype(np.uint32)[..., None] >> np.array(shifts, np.uint32)
    return (x & (1 << 32 // len(shifts)) - 1).astype(np.uint8).reshape(len(words), -1)


def packed_matrix(source, base, quant, weights):
    """(q - zero) * scale, with zeros and scales for each group of columns. GPTQ packs rows of the
    transposed matrix and AWQ its columns, compressed-tensors those of the matrix as it is."""
    import numpy as np
    method, shapes = quant["quant_method"], source.shapes
    words, zeros, scales, g_idx = (f"{base}.{part}" for part in PACKED[method][:4])
    height, width = shapes[words]
    if method == "gptq":        # the tensors know it best: some files mix 4 and 8 bits
        bits = 32 * shapes[zeros][1] // width
    else:
        bits = 4 if method == "awq" else weights["num_bits"]
    if bits not in (2, 4, 8):
        raise ExportError(f"{source.where}: {base} has {bits} bits, expected 2, 4 or 8")
    shifts = AWQ_SHIFTS if method == "awq" else range(0, 32, bits)
    shape = {"gptq": (width, height * len(shifts)), "awq": (width * len(shifts), height)}.get(
        method, (height, width * len(shifts)))

    def make():
        w, s = source.read(words), np.asarray(source.read(scales), np.float32)
        z = source.read(zeros) if zeros in shapes else None
        if method == "gptq":    # the older layout has zeros less one
            more = 0 if layout_of(quant) == "gptq_v2" else sum(1 << i for i in shifts)
            z = fields(z.astype(np.uint32) + np.uint32(more), shifts).T
            q, s = fields(w.T, shifts), s.T
        elif method == "awq":
            q, z, s = fields(w, shifts).T, fields(z, shifts).T, s.T
        else:
            q = fields(w, shifts)
            z = np.full(s.shape, 1 << bits - 1) if z is None else fields(z.T, shifts).T
        size = weights.get("group_size") or -1
        group = np.arange(shape[1]) // (size if size > 0 else shape[1])
        if g_idx in shapes:     # columns were quantised in another order
            group = source.read(g_idx).astype(np.uint32)
        elif quant.get("desc_act") and s.shape[1] > 1:
            raise ValueError("desc_act without g_idx")
        if group.max() + 1 != s.shape[1]:
            raise ValueError(f"{s.shape[1]} groups, expected {group.max() + 1}")
        return (q - z.astype(np.float32)[:, group]) * s[:, group]

    return shape, make


def scaled_matrix(source, name, scale, block):
    """8-bit weights with one scale for all, for each row or for each block."""
    import numpy as np

    def make():
        w, s = (np.asarray(source.read(n), np.float32) for n in (name, scale))
        if block:
            s = s.repeat(block[0], -2).repeat(block[1], -1)[..., :w.shape[-2], :w.shape[-1]]
        return w * s.reshape(s.shape + (1,) * (w.ndim - s.ndim))

    return source.shapes[name], make


def layout_of(quant):
    key, usual = QUANTISED[quant["quant_method"]][:2]
    return str(quant.get(key) or quant.get("format") or usual).lower()


def unpack(source, quant, arch):
    """The matrices of a quantised checkpoint as floats; quant: quantization_config."""
    method = quant.get("quant_method")
    if not quant or method == "mxfp4" and arch.interleaved:
        return source
    layouts = QUANTISED.get(method, ())[1:]
    if not layouts or layout_of(quant) not in layouts or quant.get("transform_config"):
        raise ExportError(f"{source.where}: weights are quantised ({method}"
                          f"{' ' + layout_of(quant) if layouts else ''}): not supported, known are "
                          + ", ".join(layouts or QUANTISED))
    groups = quant.get("config_groups") or {"": {"weights": quant}}
    if len(groups) > 1:
        raise ExportError(f"{source.where}: more than one of config_groups is not supported")
    weights, = (g["weights"] for g in groups.values())
    block = weights.get("weight_block_size") or weights.get("block_structure")
    made, hidden = {}, set()
    for name in source.shapes:
        base, _, part = name.rpartition(".")
        weight = re.sub("_scale(_inv)?$", "", name)
        if part in ("qweight", "weight_packed"):
            made[base + ".weight"] = packed_matrix(source, base, quant, weights)
            hidden.update(f"{base}.{p}" for p in PACKED[method])
        elif weight != name and weight in source.shapes:
            made[weight] = scaled_matrix(source, weight, name, block)
            hidden.add(name)
        elif FOR_ACTIVATIONS.fullmatch(name):
            hidden.add(name)
    return Made(source, made, hidden)


# What an adapter may have and a plain product of two matrices cannot express.
NOT_LORA = ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "arrow_config",
            "trainable_token_indices", "target_parameters", "layer_replication",
            "alora_invocation_tokens", "monteclora_config")


def of_module(patterns, module, usual):
    """peft's settings for single modules: an expression that the end of the name matches."""
    return next((value for key, value in (patterns or {}).items()
                 if re.match(rf"(.*\.)?({key})$", module)), usual)


def merge_lora(source, folder, tied):
    """W + scale * B A, for peft's adapters, in the row order of the checkpoint. The weights here
    are all of linear layers, [out, in]: for those peft ignores fan_in_fan_out."""
    import numpy as np
    where, file = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config = read_json(where, True)
    if config.get("peft_type") != "LORA":
        raise ExportError(f"{where}: peft_type is {config.get('peft_type')}, expected LORA")
    for key in NOT_LORA:
        if config.get(key):
            raise ExportError(f"{where}: {key} is {config[key]}: cannot be merged")
    for key, known in (("bias", ("none",)), ("init_lora_weights", (     # others change the model
            True, False, "gaussian", "eva", "orthogonal"))):
        if config.get(key, known[0]) not in known:
            raise ExportError(f"{where}: {key} is {config[key]}, expected "
                              + ", ".join(map(str, known)))
    if not file.is_file():
        raise ExportError(f"{file}: no such file")
    adapter, made = Safetensors(file, [file]), {}

    def product(weight, a, b, scale):
        w, a, b = source.read(weight), adapter.read(a), adapter.read(b)
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        return np.asarray(w, np.float32) + np.float32(scale) * (b @ a)

    for half, full in adapter.full.items():
        name, module = (n.partition(".lora_")[0] for n in (half, full))
        weight, a, b = (name + end for end in (".weight", ".lora_A.weight", ".lora_B.weight"))
        module = module.removeprefix("base_model.model.")
        if half not in (a, b):
            raise ExportError(f"{file}: {full} cannot be merged")
        shape = source.shapes.get(weight, ())
        if len(shape) != 2 or tied and name == "lm_head":
            raise ExportError(f"{file}: the model has no matrix of its own called {module}")
        rank = of_module(config.get("rank_pattern"), module, config["r"])
        alpha = of_module(config.get("alpha_pattern"), module, config["lora_alpha"])
        for part, wanted in (a, (rank, shape[1])), (b, (shape[0], rank)):
            if adapter.shapes.get(part) != wanted:
                raise ExportError(f"{file}: lora_{part[-8]} of {module} has shape "
                                  f"{list(adapter.shapes.get(part, ()))}, expected {list(wanted)}")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        made[weight] = shape, functools.partial(product, weight, a, b, scale)
    if not made:
        raise ExportError(f"{file}: holds no adapter")
    return Made(source, made)


# ---- Checkpoints --------------------------------------------------------------------------------

def read_json(path, required=False):
    """A JSON object; an empty one for a file that may be missing and is."""
    if not required and not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise ExportError(f"{path}: not valid JSON: {one_line(e)}") from None
    if not isinstance(value, dict):
        raise ExportError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def weight_files(folder):
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise ExportError(f"{folder}: no weights, expected {single.name} or {index.name}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ExportError(f"{index}: weight_map is missing or empty")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name or "\\" in name:
            raise ExportError(f"{index}: shard {name!r} is not a plain file name")
        if not (folder / name).is_file():
            raise ExportError(f"{folder / name}: no such file, though {index.name} names it")
    return [folder / name for name in names]


ROPE_NEEDS = {
    "default": (), "dynamic": (), "linear": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}


def hf_rope(config, arch, where):
    """Base and scaling, from transformers 5's rope_parameters or the older keys, and the base of
    the layers with a window."""
    if not isinstance(config.get("rope_parameters"), (dict, type(None))):
        raise ExportError(f"{where}: rope_parameters is {config['rope_parameters']!r:.60}, "
                          "expected an object")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or arch.defaults.get(
        "rope_scaling", {})
    local = {"rope_theta": config.get("rope_local_base_freq")}
    if rope.keys() & {"full_attention", "sliding_attention"}:
        rope, local = rope.get("full_attention") or {}, rope.get("sliding_attention") or {}
    rope, base = dict(rope), arch.local_theta and (local.get("rope_theta") or arch.local_theta)
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if arch.gguf == "phi3" and kind in ("su", "yarn"):      # older names
        kind = "longrope"
    if kind not in ROPE_NEEDS or (kind == "longrope") > (arch.gguf == "phi3"):
        raise ExportError(f"{where}: rope_type {kind} is not supported here, known are "
                          + ", ".join(ROPE_NEEDS))
    own = local.get("rope_type") or local.get("type") or "default"
    if own != "default" or base and kind == "llama3":
        raise ExportError(f"{where}: rope_type {kind}, and {own} for the layers with a window: not "
                          "supported, GGUF scales the others only")
    rope["rope_type"] = kind
    rope["original_max_position_embeddings"] = (
        config.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings") or config.get("max_position_embeddings"))
    for key in ROPE_NEEDS[kind]:
        if not isinstance(rope.get(key), (int, float)) or not 0 < rope[key] < math.inf:
            raise ExportError(f"{where}: {key} of rope_type {kind} is {rope.get(key)!r}, expected "
                              "a positive number")
    if kind == "longrope" and rope["original_max_position_embeddings"] <= 1:
        raise ExportError(f"{where}: original_max_position_embeddings is "
                          f"{rope['original_max_position_embeddings']}, expected more than 1")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ExportError(f"{where}: low_freq_factor is not below high_freq_factor")
    if kind == "yarn" and rope.get("truncate", True) != arch.truncate:
        raise ExportError(f"{where}: yarn with truncate {rope.get('truncate', True)} is not "
                          f"supported for {arch.gguf}, readers of a GGUF assume {arch.truncate}")
    if kind == "dynamic":
        log.note("GGUF cannot say dynamic rope scaling: not stored, texts over the trained "
                 "context run unscaled")
        rope["rope_type"] = "default"
    return theta, rope, base


def hf_windows(config, arch, n_layers, where):
    """Size of the sliding window, and for each layer whether it has it."""
    window = arch.slides and config.get("sliding_window")
    if not window or not config.get("use_sliding_window", True):
        return 0, []
    types = arch.slides != all_slide and config.get("layer_types")
    if not types:
        return window, [bool(arch.slides(i, config)) for i in range(n_layers)]
    other = sorted(set(map(str, types)) - {"full_attention", "sliding_attention"})
    if other or len(types) != n_layers:
        raise ExportError(f"{where}: layer_types has {len(types)} entries and {listing(other)}, "
                          f"expected full_attention or sliding_attention for {n_layers} layers")
    return window, [t == "sliding_attention" for t in types]


def refuse_values(config, arch, where):
    """Settings whose value has no meaning; those that are null or missing have a default."""
    def number(x):
        return type(x) in (int, float) and 0 < x < 1e30     # not so for NaN

    for keys, good, expected in (
            ([k for k in MULTIPLIERS if k in arch.keys], number, "a positive number below 1e30"),
            (["query_pre_attn_scalar"], number, "a positive number below 1e30"),
            ([k for k in GEMMA_CAPS if k in arch.keys],     # null: no cap
             lambda x: x is None or x == 0 or number(x), "a number from 0 to 1e30"),
            (["hidden_act", "hidden_activation"], lambda x: isinstance(x, str), "a name"),
            (["norm_topk_prob"] if arch.normed is not None else [],
             lambda x: isinstance(x, bool), "true or false"),
            (["num_experts_per_tok"] if EXPERTS[0] in arch.layer else [],
             lambda x: type(x) is int, "a whole number")):
        for key in keys:
            absent = key not in config or config[key] is None and keys[0] == "hidden_act"
            if not absent and not good(config[key]):
                raise ExportError(f"{where}: {key} is {config[key]!r:.60}, expected {expected}")


def refuse_settings(config, arch, where):
    """Settings that change what a model computes and that no GGUF can state."""
    every_4th = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
    newer = config.get("hidden_activation")     # the older key says gelu where Gemma means tanh
    alias = "swish" if arch.act == "silu" else None if newer else "gelu"
    for key, expected, given in (
            ("hidden_act", (arch.act, alias), newer or config.get("hidden_act") or arch.act),
            ("mlp_only_layers", ([],), config.get("mlp_only_layers") or []),
            ("decoder_sparse_step", (1,), config.get("decoder_sparse_step", 1)),
            ("swiglu_limit", (7.0,), config.get("swiglu_limit", 7.0)),
            ("swiglu_alpha", (1.702,), config.get("swiglu_alpha", 1.702)),
            ("use_bidirectional_attention", (False,),
             bool(config.get("use_bidirectional_attention"))),
            ("no_rope_layer_interval", (4,), config.get("no_rope_layer_interval", 4)),
            ("no_rope_layers", (every_4th,), config.get("no_rope_layers") or every_4th)):
        if given not in expected:
            raise ExportError(f"{where}: {key} is {given}, expected {expected[0]} for {arch.gguf}")


def hf_params(config, where):
    arch = find_arch(config, where)
    config = {**arch.defaults, **config, **(config.get("text_config") or {})}
    config.setdefault("qkv_bias", config.get("attention_bias"))
    if arch is GRANITE_DENSE:
        config["intermediate_size"] = config.get("shared_intermediate_size", 1024)
    if not 0 < config["num_hidden_layers"] <= 1000:
        raise ExportError(f"{where}: num_hidden_layers is {config['num_hidden_layers']}, expected "
                          "1 to 1000")
    refuse_values(config, arch, where)
    refuse_settings(config, arch, where)
    theta, rope, local_theta = hf_rope(config, arch, where)
    dim, n_heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or dim // n_heads
    part = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    if part != 1 and arch.gguf != "phi3":
        raise ExportError(f"{where}: partial_rotary_factor is not supported for {arch.gguf}")
    window, slides = hf_windows(config, arch, config["num_hidden_layers"], where)
    experts = EXPERTS[0] in arch.layer
    p = Params(
        dim=dim, hidden_dim=config["intermediate_size"], n_layers=config["num_hidden_layers"],
        n_heads=n_heads, n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=head_dim, vocab_size=config.get("vocab_size") or 1,    # the embedding will tell
        max_seq_len=config.get("max_position_embeddings", 2048),
        norm_eps=config.get("rms_norm_eps", 1e-6), n_rot=int(head_dim * part), rope_theta=theta,
        rope=rope, tied=bool(config.get("tie_word_embeddings")), arch=arch, config=config,
        window=window, slides=slides, local_theta=local_theta)
    if experts:
        p.n_experts = config.get("num_local_experts") or config["num_experts"]
        p.narrow = config.get("moe_intermediate_size") or config["intermediate_size"]
        p.shared = config.get("shared_expert_intermediate_size") or config.get(
            "shared_intermediate_size") or 0
        if not 0 < config["num_experts_per_tok"] <= p.n_experts <= 1024:
            raise ExportError(f"{where}: {config['num_experts_per_tok']} of {p.n_experts} experts, "
                              "expected at most 1024")
    p.check(where)
    factors = rope["rope_type"] == "longrope" and [rope["short_factor"], rope["long_factor"]]
    if factors and not all(len(f) == p.n_rot // 2 and min(f) > 0 for f in factors):
        raise ExportError(f"{where}: short_factor and long_factor are not {p.n_rot // 2} positive "
                          "numbers each")
    return p


def rows_of(source, name):
    if len(source.shapes.get(name, ())) != 2:
        raise ExportError(f"{source.where}: tensor missing: {name}")
    return source.shapes[name][0]


def load_hf(folder, lora=None):
    where = folder / "config.json"
    config = read_json(where, True)
    with parsing(where):
        p = hf_params(config, where)
    source = Safetensors(folder, weight_files(folder))
    with parsing(folder):
        source = unpack(source, p.config.get("quantization_config") or {}, p.arch)
    rows = rows_of(source, "embed_tokens.weight")
    if p.config.get("vocab_size", rows) != rows:
        log.note(f"{where}: vocab_size is {p.vocab_size}, using the embedding's {rows} rows")
    p.vocab_size = rows
    if "lm_head.weight" not in source.shapes and "tie_word_embeddings" not in p.config:
        log.note("no lm_head.weight and no tie_word_embeddings: the embedding is the classifier")
        p.tied = True
    if lora:
        with parsing(lora):
            source = merge_lora(source, lora, p.tied)
    return Model(p, source, True)


def meta_model(args, source, where, max_seq_len, rope=None):
    """A Meta or llama2.c checkpoint; sizes that the weights show are read there."""
    import numpy as np
    with parsing(where):
        p = Params(
            dim=args["dim"], hidden_dim=rows_of(source, "layers.0.mlp.gate_proj.weight"),
            n_layers=args["n_layers"], n_heads=args["n_heads"],
            n_kv_heads=args.get("n_kv_heads") or args["n_heads"],
            head_dim=args["dim"] // args["n_heads"], n_rot=args["dim"] // args["n_heads"],
            vocab_size=rows_of(source, "embed_tokens.weight"), max_seq_len=max_seq_len,
            norm_eps=args.get("norm_eps", 1e-5), rope_theta=args.get("rope_theta") or 10000.0,
            arch=ARCHS["LlamaForCausalLM"])
        p.check(where)
    p.rope = rope or p.rope
    shapes, (ours, theirs) = source.shapes, ("lm_head.weight", "embed_tokens.weight")
    p.tied = ours not in shapes or (shapes[ours] == shapes[theirs] and bool(
        np.array_equal(source.read(ours), source.read(theirs))))
    return Model(p, source, False)


def load_pt(path):
    checkpoint = torch_load(path)
    args = checkpoint.get("model_args") if isinstance(checkpoint, dict) else None
    if not isinstance(args, dict) or "model" not in checkpoint:
        raise ExportError(f"{path}: expected a llama2.c checkpoint with model and model_args")
    source = Torch(path, [torch_tensors(path, checkpoint["model"])])
    return meta_model(args, source, path, args.get("max_seq_len", 2048))


def load_meta(folder):
    where = folder / "params.json"
    args = read_json(where, True)
    files = {int(f.name.split(".")[1]): f for f in folder.glob("consolidated.*.pth")
             if f.name.split(".")[1].isdigit()}
    if sorted(files) != list(range(len(files))) or not files:
        raise ExportError(f"{folder}: found {len(files)} consolidated.*.pth, expected all from "
                          "consolidated.00.pth on")
    shards = [torch_tensors(f, torch_load(f)) for _, f in sorted(files.items())]
    for i, shard in enumerate(shards):
        if set(shard) != set(shards[0]):
            raise ExportError(f"{files[i]}: tensors differ from {files[0].name}: "
                              + listing(sorted(set(shard) ^ set(shards[0]))))
    axes = {}
    for name, t in shards[0].items():
        if t.dim() == 2 and len(shards) > 1:    # wo and w2 split their input, the rest their output
            axes[name] = int(name.split(".")[-2] in ("o_proj", "down_proj"))
            if name == "embed_tokens.weight":     # Llama 1, 2: the width; 3: the vocabulary
                axes[name] = int(t.shape[1] != args.get("dim"))
    # params.json does not say how long the training texts were; the rest shows the generation.
    theta, scaled = args.get("rope_theta"), args.get("use_scaled_rope")
    length = 131072 if scaled else {500000: 8192, 1000000: 16384}.get(
        theta, 2048 if args.get("norm_eps") == 1e-6 else 4096)
    rope = scaled and {     # constants in Meta's code; its small 3.2 models are published with 32
        "rope_type": "llama3", "factor": 8.0 if args.get("dim", 0) >= 4096 else 32.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return meta_model(args, Torch(folder, shards, axes), where, length, rope)


# ---- Tokenizers ---------------------------------------------------------------------------------
#
# Kept as GGUF has them: "llama" (SentencePiece, merged by score, U+2581 for a space) or "gpt2"
# (byte-level, merged by rank, bytes shown as printable characters).

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"


@dataclass
class Vocab:
    model: str
    tokens: list = field(default_factory=list)      # bytes
    types: list = field(default_factory=list)
    scores: list = field(default_factory=list)      # written for llama only
    merges: list = None                             # "left right", for gpt2
    pre: str = "default"                            # name of the splitting rule, for gpt2
    ids: dict = field(default_factory=dict)         # bos, eos, unk, pad, eot, eom
    add_bos: bool = True
    add_eos: bool = False
    space_prefix: bool = True
    template: str = ""

    def find(self, text):
        raw = text.encode()
        return self.tokens.index(raw) if raw in self.tokens else None

    def place(self, i, text, kind, score=0.0):
        """Put a token at id i; ids that nobody claims become unused padding."""
        if not 0 <= i < 1 << 24:
            raise ValueError(f"token id {i}")
        for n in range(len(self.tokens), i + 1):
            self.tokens.append(b"[PAD%d]" % n)
            self.types.append(UNUSED)
            self.scores.append(-10000.0)
        self.tokens[i], self.types[i], self.scores[i] = text.encode(), kind, score

    def place_added(self, i, text, special):
        """Tokens that look like mark-up are control tokens even where nobody flagged them."""
        if i < len(self.tokens) and self.tokens[i] == text.encode() \
                and self.types[i] in (UNKNOWN, CONTROL, BYTE):
            return
        if special or re.fullmatch(r"<\|.*\|>|<｜.*｜>|<unused.*>|<pad>|<mask>", text, re.S):
            self.place(i, text, CONTROL, -1000.0)
        else:
            self.place(i, text.replace(SPACE, " "), USER_DEFINED, -1000.0)

    def fit(self, rows, where):
        """One token for each row of the embedding, no more and no less."""
        n = len(self.tokens)
        if any(t not in (CONTROL, USER_DEFINED, UNUSED) for t in self.types[rows:]):
            raise ExportError(f"{where}: the tokenizer has {n} tokens, the embedding {rows} rows")
        if n > rows:
            log.note(f"{n - rows} added tokens have no row in the embedding: left out, from "
                     f"{self.tokens[rows].decode()!r} on")
            del self.tokens[rows:], self.types[rows:], self.scores[rows:]
        elif n < rows:
            self.place(rows - 1, f"[PAD{rows - 1}]", UNUSED, -10000.0)
        self.ids = {role: i for role, i in self.ids.items() if i < rows}

    def set_stops(self, stops):
        """GGUF has three places for ids that end a text: eos, eot (turn) and eom (message)."""
        stops = [i for i in dict.fromkeys(stops) if 0 <= i < len(self.tokens)]
        eom = [i for i in stops[1:] if b"eom" in self.tokens[i]][:1]
        rest = [i for i in stops if i not in eom]
        roles = ("eos", "eot") if eom else ("eos", "eot", "eom")
        self.ids.update([*zip(roles, rest), *zip(("eom",), eom)])
        if len(rest) > len(roles):
            lost = [self.tokens[i].decode() for i in rest[len(roles):]]
            log.note(f"GGUF has three places for end tokens, no room for {listing(lost)}")


def vocab_from_spm(path, data):
    pb = package("sentencepiece.sentencepiece_model_pb2").ModelProto()
    try:
        pb.ParseFromString(data)
    except Exception as e:      # protobuf's DecodeError lives in different places
        raise ExportError(f"{path}: not a SentencePiece model: {one_line(e)}") from None
    spec, norm = pb.trainer_spec, pb.normalizer_spec
    if not pb.pieces or spec.model_type != 2:
        kind = {1: "unigram", 3: "word", 4: "char"}.get(spec.model_type, spec.model_type)
        raise ExportError(f"{path}: SentencePiece model of type {kind}, expected BPE")
    v = Vocab("llama", space_prefix=norm.add_dummy_prefix)
    for i, piece in enumerate(pb.pieces):       # their types have GGUF's numbers
        text = piece.piece.replace(SPACE, " ") if piece.type == USER_DEFINED else piece.piece
        v.place(i, text, piece.type, piece.score)
    v.ids = {role: i for role, i in (("unk", spec.unk_id), ("bos", spec.bos_id),
                                     ("eos", spec.eos_id), ("pad", spec.pad_id)) if i >= 0}
    if norm.remove_extra_whitespaces or norm.precompiled_charsmap:
        log.note(f"{path}: its normaliser {norm.name} changes the text first, which GGUF and .bin "
                 "cannot say: ids of unusual text will differ")
    added = {}      # from all places where tools have kept them, the surest last
    for text, i in read_json(path.parent / "added_tokens.json").items():
        added[i] = text, False
    for t in read_json(path.parent / "tokenizer.json").get("added_tokens") or []:
        added[t["id"]] = t["content"], t.get("special")
    settings = read_json(path.parent / "tokenizer_config.json")
    for i, t in (settings.get("added_tokens_decoder") or {}).items():
        added[int(i)] = t["content"], t.get("special")
    for i in sorted(added):
        v.place_added(i, *added[i])
    return v


# The splitting rules of byte-level tokenizers, by the names that GGUF has for them.
_END = r"|\s+(?!\S)|\s+"
_LINES = r"|\s*[\r\n]+" + _END
_SUFFIX, _ONE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = [f"{_ONE}{_UPPER}*{_LOWER}+", f"{_ONE}{_UPPER}+{_LOWER}*"]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _END
LLAMA3 = _SUFFIX + "|" + _ONE + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = _SUFFIX + "|" + _ONE + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES
TEKKEN = "|".join(_CASED) + r"|\p{N}" + _MARKS
GPT4O = "|".join(c + _SUFFIX + "?" for c in _CASED) + r"|\p{N}{1,3}" + _MARKS
DEEPSEEK3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|""" + \
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + _LINES
PRE = {
    (GPT2,): "gpt-2", (r"\p{N}", GPT2): "smollm", (LLAMA3,): "llama-bpe", (QWEN2,): "qwen2",
    (QWEN35,): "qwen35", (TEKKEN,): "tekken", (GPT4O,): "gpt-4o",
    (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3): "deepseek-v3",
    (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"): "deepseek-coder",
}


def steps(part):
    """The steps of a component of tokenizer.json, Sequences opened."""
    if not part or part["type"] != "Sequence":
        return [part] if part else []
    lists = [part[k] for k in ("pretokenizers", "normalizers", "processors") if k in part]
    return [s for p in lists[0] for s in steps(p)]


def pre_name(tokenizer, where):
    rules = []
    for step in steps(tokenizer.get("pre_tokenizer")):
        if step["type"] == "Split":
            how = step.get("behavior"), bool(step.get("invert"))
            rules.append(next(iter(step["pattern"].values()))
                         .replace("\r", r"\r").replace("\n", r"\n"))
            if how not in (("Isolated", False), ("Removed", True)):
                rules.append(f"<{how[0]}, invert {how[1]}>")
        elif step["type"] == "Digits":
            rules.append(r"\p{N}" if step.get("individual_digits") else r"\p{N}+")
        elif step["type"] == "ByteLevel":
            rules += [GPT2] if step.get("use_regex", True) else []
        else:
            rules.append(f"<{step['type']}>")
    name = PRE.get(tuple(rules))
    if name is None:
        found = " then ".join(rules) or "nothing"
        raise ExportError(f"{where}: the pre_tokenizer splits by {found}, which has no known name: "
                          "give the right one with --pre NAME")
    if name == "llama-bpe" and not tokenizer["model"].get("ignore_merges"):
        return "dbrx"       # the same expression, but whole words do not skip the merges
    return name


def vocab_from_json(path, tokenizer, pre):
    model = tokenizer["model"]
    kind, merges = model.get("type", "BPE"), model.get("merges") or []
    odd = [k for k in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(k)]
    if kind != "BPE" or odd:
        raise ExportError(f"{path}: model of type {' with '.join([kind, *odd])}, expected BPE")
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in merges]
    before = steps(tokenizer.get("pre_tokenizer"))
    byte_level = [s for s in before if s["type"] == "ByteLevel"]
    normalizers = steps(tokenizer.get("normalizer"))
    if byte_level:
        v = Vocab("gpt2", merges=[f"{a} {b}" for a, b in merges], space_prefix=False)
        v.pre = pre or pre_name(tokenizer, path)
        unsaid = [s["type"] for s in normalizers if s["type"] != "NFC"] \
            + ["add_prefix_space"] * any(s.get("add_prefix_space") for s in byte_level)
    elif model.get("byte_fallback") and "<0x00>" in model["vocab"]:
        prefix = [s for s in normalizers if s["type"] == "Prepend"] + [
            s for s in before if s["type"] == "Metaspace" and "never" != s.get(
                "prepend_scheme", "always" if s.get("add_prefix_space", True) else "never")]
        v = Vocab("llama", space_prefix=bool(prefix))
        unsaid = [s["type"] for s in normalizers if s["type"] not in ("Prepend", "Replace")]
    else:
        raise ExportError(f"{path}: neither byte-level nor SentencePiece with byte_fallback: not "
                          "supported")
    rank = {}       # SentencePiece's scores are lost here; the order of the merges stands for them
    for i, (a, b) in enumerate(merges):
        rank.setdefault(a + b, i)
    whole = bool(model.get("ignore_merges"))    # is a word that is a token taken as it is?
    special = {t["content"] for t in tokenizer.get("added_tokens") or []}
    if byte_level and whole != (v.pre in ("llama-bpe", "tekken")) and any(
            len(t) > 1 and t not in rank and t not in special for t in model["vocab"]):
        unsaid.append(f"ignore_merges {whole} with {v.pre}")
    if unsaid:
        log.note(f"{path}: GGUF cannot say {', '.join(unsaid)}: ids of some texts will differ")
    for text, i in sorted(model["vocab"].items(), key=lambda item: item[1]):
        byte = not byte_level and re.fullmatch("<0x[0-9A-F]{2}>", text)
        kind = BYTE if byte else UNKNOWN if text == model.get("unk_token") else NORMAL
        v.place(i, text, kind, 0.0 if kind != NORMAL else -float(rank.get(text, len(merges))))
        if kind == UNKNOWN:
            v.ids["unk"] = i
    for t in tokenizer.get("added_tokens") or []:
        v.place_added(t["id"], t["content"], t.get("special"))
    return v


def vocab_from_tiktoken(path, data):
    """Meta's Llama 3 file: 128,000 byte strings in merge order; 256 special tokens follow them."""
    ranks = {base64.b64decode(text): int(n) for text, n in map(bytes.split, data.splitlines())}
    if sorted(ranks.values()) != list(range(128000)):
        raise ExportError(f"{path}: {len(ranks)} ranks, expected Llama 3's 0 to 127999")
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shown = dict(zip([*plain, *sorted(set(range(256)) - set(plain))],
                     map(chr, [*plain, *range(256, 324)])))
    v = Vocab("gpt2", merges=[], pre="llama-bpe", space_prefix=False)

    def show(text):
        return "".join(shown[b] for b in text)

    for text, rank in sorted(ranks.items(), key=lambda item: item[1]):
        v.place(rank, show(text), NORMAL)
        parts = [bytes([b]) for b in text]
        while len(parts) > 2:       # merge what came before this token: its last two parts
            pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            best = pairs.index(min(pairs))
            if pairs[best] >= rank:
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            v.merges.append(" ".join(map(show, parts)))
    names = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id",
             8: "eom_id", 9: "eot_id"}
    for i in range(256):
        name = names.get(i) or f"reserved_special_token_{i - 2 if i < 6 else i - 5}"
        v.place(128000 + i, f"<|{name}|>", CONTROL)
    v.ids = {"bos": 128000, "eos": 128001, "eom": 128008, "eot": 128009}
    return v


GGUF_IDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "eot": "eot",
            "eom": "eom"}


def vocab_from_gguf(path):
    fields = package("gguf").GGUFReader(path).fields

    def get(key, default=None):
        f = fields.get("tokenizer." + key)
        return default if f is None else f.contents()

    def texts(key):     # token texts may be any bytes, so no decoding here
        f = fields.get("tokenizer.ggml." + key)
        return f and [bytes(f.parts[i]) for i in f.data]

    model, tokens, llama = get("ggml.model"), texts("tokens"), get("ggml.model") == "llama"
    if not tokens or model not in ("llama", "gpt2"):
        raise ExportError(f"{path}: tokenizer of type {model!r}, expected llama or gpt2")
    n = len(tokens)
    types, scores = get("ggml.token_type") or [NORMAL] * n, get("ggml.scores") or [0.0] * n
    if not len(types) == len(scores) == n:
        raise ExportError(f"{path}: {n} tokens, but {len(types)} types and {len(scores)} scores")
    v = Vocab(model, tokens, types, scores)
    v.merges = [m.decode() for m in texts("merges") or []]
    v.pre, v.template = get("ggml.pre", "default"), get("chat_template", "")
    builtin = {"bos": 1, "eos": 2, "unk": 0} if llama else {}
    ids = {k: get(f"ggml.{name}_token_id", builtin.get(k)) for k, name in GGUF_IDS.items()}
    v.ids = {k: i for k, i in ids.items() if i is not None}
    v.add_bos, v.add_eos = get("ggml.add_bos_token", llama), get("ggml.add_eos_token", False)
    v.space_prefix = get("ggml.add_space_prefix", llama)
    return v


def adds(tokenizer, settings, side, default):
    """Is BOS (side 0) or EOS (side -1) put around a text? tokenizer.json decides, if it can."""
    after = steps(tokenizer.get("post_processor"))
    for step in after:
        if step["type"] == "TemplateProcessing":
            return "SpecialToken" in step["single"][side]
    flag = settings.get("add_eos_token" if side else "add_bos_token")
    return False if after else default if flag is None else bool(flag)


def apply_settings(v, folder):
    """What the files around a tokenizer say: special tokens, BOS and EOS, the chat template."""
    settings = read_json(folder / "tokenizer_config.json")
    tokenizer = read_json(folder / "tokenizer.json")
    texts = {**read_json(folder / "special_tokens_map.json"), **settings}
    for role in ("bos", "eos", "unk", "pad"):
        text = texts.get(role + "_token")
        text = text.get("content") if isinstance(text, dict) else text
        if text and (i := v.find(text)) is not None:
            v.ids[role] = i
            if role == "unk" and v.types[i] == CONTROL and v.model == "llama":
                v.types[i] = UNKNOWN
    is_llama = v.model == "llama" and "Llama" in (settings.get("tokenizer_class") or "Llama")
    v.add_bos = adds(tokenizer, settings, 0, is_llama)
    v.add_eos = adds(tokenizer, settings, -1, False)
    template = settings.get("chat_template") or ""
    if isinstance(template, list):
        named = {t["name"]: t["template"] for t in template}
        template = named.get("default") or next(iter(named.values()), "")
    if not isinstance(template, str):
        raise TypeError(f"chat_template is {type(template).__name__}")
    jinja = folder / "chat_template.jinja"
    v.template = jinja.read_text(encoding="utf-8") if jinja.exists() else template


def load_vocab(path, pre):
    """A tokenizer from a file, or from a folder that has one; None if it has none."""
    if path.is_dir():
        model, fast = path / "tokenizer.model", path / "tokenizer.json"
        if model.exists() and not (fast.exists() and is_rank_file(model.read_bytes())):
            return load_vocab(model, pre)
        return load_vocab(fast, pre) if fast.exists() else None
    data = path.read_bytes()
    with parsing(path):
        if data[:4] == b"GGUF":
            return vocab_from_gguf(path)
        if is_rank_file(data):
            return vocab_from_tiktoken(path, data)
        is_json = data.lstrip()[:1] == b"{"
        v = vocab_from_json(path, read_json(path), pre) if is_json else vocab_from_spm(path, data)
        apply_settings(v, path.parent)
    return v


def is_rank_file(data):
    return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data[:200]) is not None


def finish_vocab(v, folder, rows, stops):
    """Fit the tokenizer to the model: rows of its embedding, end tokens of its configuration."""
    config = read_json(folder / "config.json") if folder else {}
    generation = read_json(folder / "generation_config.json") if folder else {}
    rows = rows or config.get("vocab_size")
    if rows:
        v.fit(rows, folder or "tokenizer")
    for role in ("bos", "pad"):
        i = config.get(role + "_token_id")
        if role not in v.ids and isinstance(i, int) and 0 <= i < len(v.tokens):
            v.ids[role] = i
    if not stops:
        listed = [c.get("eos_token_id") for c in (config, generation)]
        stops = [i for x in listed for i in (x if isinstance(x, list) else [x]) if type(i) is int]
        stops += [v.ids[role] for role in ("eos", "eot", "eom") if role in v.ids]
    v.set_stops(stops)
    if len(set(v.tokens)) != len(v.tokens):
        log.note("two tokens have the same text: llama.cpp will not load this tokenizer")


# ---- Writing GGUF -------------------------------------------------------------------------------

@contextlib.contextmanager
def whole_file(path):
    """A new file's name to write to, which becomes path only if all goes well."""
    for i in itertools.count():
        part = path.with_name(path.name + (f".{i}.part" if i else ".part"))
        with contextlib.suppress(FileExistsError):
            open(part, "x").close()     # tempfile would make it unreadable for others
            break
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def rope_keys(p):
    kind, rope = p.rope["rope_type"], p.rope
    original = rope.get("original_max_position_embeddings") or p.max_seq_len
    keys = {"rope.dimension_count": p.n_rot, "rope.freq_base": float(p.rope_theta)}
    if p.local_theta:
        keys["rope.freq_base_swa"] = float(p.local_theta)
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "longrope":      # the type itself is not written: readers go by the tensors
        factor = rope.get("factor") or p.max_seq_len / original
        keys["rope.scaling.attn_factor"] = float(rope.get("attention_factor") or math.sqrt(
            1 + math.log(max(factor, 1)) / math.log(original)))
    temperature = rope.get("llama_4_scaling_beta") if p.arch.gguf == "mistral3" else None
    if temperature is not None:
        keys["attention.temperature_scale"] = float(temperature)
    if kind in ("yarn", "longrope") or temperature is not None or p.arch.gguf == "phi3":
        keys["rope.scaling.original_context_length"] = int(original)
    if kind == "yarn":
        scale, over = rope.get("mscale"), rope.get("mscale_all_dim")
        whole, log_factor = rope.get("attention_factor"), 0.1 * math.log(max(rope["factor"], 1))
        if whole is None and scale and over:
            if scale == 1 and p.arch.gguf == "mistral3":
                keys["rope.scaling.yarn_log_multiplier"] = float(over)
            else:
                whole = (scale * log_factor + 1) / (over * log_factor + 1)
        for key, value in (("attn_factor", whole), ("beta_fast", rope.get("beta_fast")),
                           ("beta_slow", rope.get("beta_slow"))):
            if value is not None:
                keys["rope.scaling.yarn_" + key] = float(value)
    return keys


def param_keys(p):
    """What a GGUF says about the model, without the architecture's prefix."""
    c, arch = p.config, p.arch
    keys = {
        "context_length": p.max_seq_len, "embedding_length": p.dim, "block_count": p.n_layers,
        "feed_forward_length": p.hidden_dim, "attention.head_count": p.n_heads,
        "attention.head_count_kv": p.n_kv_heads, "attention.key_length": p.head_dim,
        "attention.value_length": p.head_dim,
        "attention.layer_norm_rms_epsilon": float(p.norm_eps), "vocab_size": p.vocab_size,
        **rope_keys(p)}
    if p.n_experts:
        keys |= {"expert_count": p.n_experts, "expert_used_count": c["num_experts_per_tok"]}
    if arch.normed not in (None, c.get("norm_topk_prob", False)):
        keys["expert_weights_norm"] = c.get("norm_topk_prob", False)
    for setting, (key, kind) in arch.keys.items():
        if c.get(setting) is not None:
            keys[key] = kind(c[setting])
        elif arch.gguf == "gemma2":     # its readers have defaults for the caps
            keys[key] = 0.0
    divisor = c.get("query_pre_attn_scalar", p.head_dim)
    if divisor != (p.dim // p.n_heads if p.n_layers == arch.big else p.head_dim):
        keys["attention.scale"] = float(divisor ** -0.5)
    usual = [bool(arch.slides(i, {})) for i in range(p.n_layers)] if p.window else []
    if any(p.slides) or p.window and not all(usual):
        keys["attention.sliding_window"] = p.window
        if p.slides != usual or arch.gguf == "olmo2":
            keys["attention.sliding_window_pattern"] = p.slides
    elif arch.gguf == "phi3":
        keys["attention.sliding_window"] = 0
    return keys


def check_fit(name, value, form):
    """GGUFWriter packs numbers late, where nobody knows their names any more."""
    try:
        struct.pack("<" + form, value)
        fits = math.isfinite(value)
    except (struct.error, OverflowError):
        fits = False
    if not fits:
        raise ValueError(f"{name} is {value!r:.40}, which does not fit")


def write_params(w, p):
    for key, value in param_keys(p).items():
        add = {int: w.add_uint32, float: w.add_float32, bool: w.add_bool, str: w.add_string,
               list: w.add_array}[type(value)]
        if type(value) in (int, float):
            check_fit(key, value, "I" if type(value) is int else "f")
        add(f"{p.arch.gguf}.{key}", value)


def write_vocab(w, v):
    w.add_tokenizer_model(v.model)
    w.add_tokenizer_pre(v.pre)
    w.add_token_list(v.tokens)
    if v.model == "llama":
        w.add_token_scores(v.scores)
    w.add_token_types(v.types)
    w.add_token_merges(v.merges or [])
    for role, i in v.ids.items():
        w.add_uint32(f"tokenizer.ggml.{GGUF_IDS[role]}_token_id", i)
    w.add_add_bos_token(v.add_bos)
    w.add_add_eos_token(v.add_eos)
    w.add_add_space_prefix(v.space_prefix)
    if v.template:
        w.add_chat_template(v.template)


def write_sampling(w, generation):
    """The sampler settings that the model's makers recommend."""
    for key, add, kind in (("temperature", w.add_sampling_temp, float),
                           ("top_k", w.add_sampling_top_k, int),
                           ("top_p", w.add_sampling_top_p, float),
                           ("min_p", w.add_sampling_min_p, float),
                           ("repetition_penalty", w.add_sampling_penalty_repeat, float)):
        value = generation.get(key)
        if type(value) in (int, float):
            check_fit(key, value, "f")
            check_fit(key, kind(value), "i" if kind is int else "f")
            add(kind(value))


def rope_tensors(p):
    """Divisors of the frequencies, by the names of GGUF."""
    import numpy as np
    kind, rope = p.rope["rope_type"], p.rope
    if kind == "longrope":
        return {f"rope_factors_{k}.weight": np.array(rope[k + "_factor"], np.float32)
                for k in ("long", "short")}
    if kind != "llama3":
        return {}
    # Llama 3.1: slow rotations are slowed by factor, fast ones kept, a ramp between.
    low, high, old, factor = (rope[k] for k in (
        "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "factor"))
    inv_freq = p.rope_theta ** (-np.arange(0, p.head_dim, 2) / p.head_dim)
    smooth = np.clip((old * inv_freq / (2 * np.pi) - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)}


def storage_type(name, t, wanted, p):
    """The GGUF type of one tensor. The classifier has more bits in a 4-bit file: it decides
    every token, and rounding it costs more than the bytes it would save."""
    types = package("gguf").GGMLQuantizationType
    if t.packed and wanted != "f32":
        return types.MXFP4      # as it is: any other type would be larger or worse
    if len(t.shape) == 1 or "ffn_gate_inp" in name or name.endswith(".bias"):
        return types.F32
    last = name == ("token_embd.weight" if p.tied else "output.weight")
    if wanted[0] == "q" and t.shape[-1] % 32:
        return types.F16
    if wanted == "q4_0" and last or wanted[-1] == "K" and t.shape[-1] % 256:
        return types.Q8_0
    if wanted == "q4_K":    # the mix of llama.cpp's Q4_K_M
        found, n = re.match(r"blk\.(\d+)\.(attn_v|attn_qkv|ffn_down)", name), p.n_layers
        i = int(found[1]) if found else 0
        if last or found and (i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2):
            return types.Q6_K
    return types[wanted.upper()]


def ratio(a, b):
    """a / b, 0 where b is 0."""
    import numpy as np
    return a / np.where(b == 0, np.float32(np.inf), b)


def rounded(x, low, high):
    import numpy as np
    return np.clip(np.rint(x), low, high)


def dots(a, b):
    import numpy as np
    return np.einsum("...i,...i", a, b)


def extreme(x):
    """The value farthest from 0 in each row."""
    import numpy as np
    return np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)


def q4_k_blocks(x):
    """Blocks of 256: eight groups of 32, each about d * scale * q + dmin * low, q of 4 bits."""
    import numpy as np
    x = x.reshape(-1, 8, 32)
    low = np.minimum(x.min(-1), 0)
    scale = (x.max(-1) - low) / 15
    sx = x.sum(-1)
    for _ in range(3):      # the q nearest to a line, then the line that fits these q best
        q = rounded(ratio(x - low[..., None], scale[..., None]), 0, 15)
        sq, qq, qx = q.sum(-1), dots(q, q), dots(q, x)
        scale = ratio(32 * qx - sq * sx, 32 * qq - sq * sq)
        low = (sx - scale * sq) / 32
        scale, low = np.where(low > 0, ratio(qx, qq), scale), np.minimum(low, 0)
    d, d_low = ((extreme(v) / 63).astype("<f2") for v in (scale, -low))
    s = rounded(ratio(scale, d.astype(np.float32)), 0, 63)
    m = rounded(ratio(-low, d_low.astype(np.float32)), 0, 63)
    fine, base = s * d, m * d_low
    q = rounded(ratio(x + base[..., None], fine[..., None]), 0, 15).astype(np.uint8)
    s, m, q = s.astype(np.uint8), m.astype(np.uint8), q.reshape(-1, 4, 2, 32)
    return np.concatenate([
        d.view(np.uint8), d_low.view(np.uint8), s[:, :4] | s[:, 4:] >> 4 << 6,
        m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | m[:, 4:] << 4,
        (q[:, :, 0] | q[:, :, 1] << 4).reshape(-1, 128)], -1)


def q6_k_blocks(x):
    """Blocks of 256: sixteen groups of 16, each about d * scale * q, q of 6 bits with a sign."""
    import numpy as np
    x = x.reshape(-1, 16, 16)
    scale = extreme(x)[..., 0] / -32
    for _ in range(3):
        q = rounded(ratio(x, scale[..., None]), -32, 31)
        scale = ratio(dots(q, x), dots(q, q))
    d = (extreme(scale) / -128).astype("<f2")
    s = rounded(ratio(scale, d.astype(np.float32)), -128, 127)
    q = rounded(ratio(x, (s * d)[..., None]), -32, 31).astype(np.int8).view(np.uint8)
    q = (q + 32).reshape(-1, 2, 4, 32)      # halves of 128, of four rows
    low, high = q & 15, q >> 4
    return np.concatenate([
        (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128),
        (high << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(2, np.uint8).reshape(-1, 64),
        s.astype(np.int8).view(np.uint8), d.view(np.uint8)], -1)


K_BLOCKS = {"Q4_K": q4_k_blocks, "Q6_K": q6_k_blocks}


def encode(x, kind, name):
    import numpy as np
    quants, types = package("gguf").quants, package("gguf").GGMLQuantizationType
    if x.dtype == np.uint8:     # MXFP4 already
        if (x[..., ::17] == 255).any():
            raise ExportError(f"{name}: holds a block whose scale is no number")
        return x if kind == types.MXFP4 else quants.dequantize(x, types.MXFP4)
    limit = {"F16": 65504.0, "Q8_0": 65504.0 * 127, "Q4_0": 65504.0 * 8, "Q4_K": 65504.0 * 63,
             "Q6_K": 65504.0 * 63}.get(kind.name, math.inf)
    biggest = max(float(x.max()), -float(x.min()))
    if biggest > limit:     # the quantised types have a float16 scale
        raise ExportError(f"{name}: value {biggest:g} does not fit {kind.name.lower()}, at most "
                          f"{limit:g}: use --type bf16 or f32")
    if kind.name in K_BLOCKS:
        rows = x.reshape(-1, 256)       # a part at a time, which stays in the processor's cache
        parts = [K_BLOCKS[kind.name](rows[i:i + 1024]) for i in range(0, len(rows), 1024)]
        return np.concatenate(parts).reshape(*x.shape[:-1], -1)
    return np.ascontiguousarray(quants.quantize(x, kind))


def write_gguf(path, model, params, v, a):
    """Without a model: the tokenizer alone; without params: nothing known of a model."""
    import numpy as np
    gguf = package("gguf")
    w = gguf.GGUFWriter(path, params.arch.gguf if params else "llama")
    w.add_type("model")
    w.add_name(a.name or (a.hf.resolve().name if a.hf else a.out.stem))
    plan = []
    settings = a.hf / "config.json" if a.hf else a.meta or a.checkpoint
    if params:
        with parsing(settings):
            write_params(w, params)
    if model:
        wanted = a.type or model.source.dtype(next(iter(
            model.tensors["token_embd.weight"].sources)))
        with parsing(settings), np.errstate(all="ignore"):
            ropes = rope_tensors(params)
            for name, x in ropes.items():
                if not (np.isfinite(x) & (x > 0)).all():
                    raise ValueError(f"{name} would hold values that are not positive numbers")
        plan = [(name, t.shape, storage_type(name, t, wanted, params))
                for name, t in model.tensors.items()]
        plan += [(name, x.shape, gguf.GGMLQuantizationType.F32) for name, x in ropes.items()]
        mxfp4 = any(kind.name == "MXFP4" for _, _, kind in plan)
        w.add_file_type(38 if mxfp4 else {
            "f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "q4_K": 15, "q6_K": 18, "bf16": 32}[wanted])
        if wanted[0] == "q":
            w.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for other, multiple in ("F16", 32), ("Q8_0", 256 if wanted[-1] == "K" else 1):
                kept = [n for n, shape, k in plan if k.name == other and shape[-1] % multiple]
                if kept:
                    log.note(f"rows are not a multiple of {multiple}, stored as {other.lower()}: "
                             + listing(kept))
    write_vocab(w, v)
    if a.hf:
        with parsing(a.hf / "generation_config.json"):
            write_sampling(w, read_json(a.hf / "generation_config.json"))
    for name, shape, kind in plan:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        w.add_tensor_info(name, shape, "float32", math.prod(shape) // block * size, kind)
    try:
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        for i, (name, shape, kind) in enumerate(plan, 1):
            x = ropes[name] if name in ropes else model.load(name)
            w.write_tensor_data(encode(x, kind, name))
            log.progress(i, len(plan), name)
    finally:
        w.close()


# ---- Writing .bin -------------------------------------------------------------------------------

def check_bin(p):
    """A .bin has no field for these and its readers take one value: another is wrong text."""
    for name, found, expected in (
            ("architecture", p.arch.gguf, "llama"), ("experts", p.n_experts, 0),
            ("rope_theta", p.rope_theta, 10000), ("rope scaling", p.rope["rope_type"], "default"),
            ("head size", p.head_dim, p.dim / p.n_heads), ("norm eps", round(p.norm_eps, 9), 1e-5),
            ("attention_bias", bool(p.config.get("attention_bias")), False),
            ("mlp_bias", bool(p.config.get("mlp_bias")), False)):
        if found != expected:
            raise ExportError(f"a .bin cannot hold {name} {found}, only {expected}: export to "
                              ".gguf instead")
    if 0 < p.window < p.max_seq_len:    # inside one window full attention is the same
        log.note(f"sliding window: the context is cut from {p.max_seq_len} to {p.window}")
        p.max_seq_len = p.window


def check_bin_vocab(v):
    """llama2.c's tokenizer is SentencePiece with fixed ids and always a space in front."""
    problem = None
    if v.model != "llama":
        problem = f"a byte-level tokenizer ({v.pre})"
    elif not v.space_prefix:
        problem = "a tokenizer that puts no space before a text"
    elif (v.ids.get("bos"), v.ids.get("eos")) != (1, 2):
        problem = f"bos id {v.ids.get('bos')} and eos id {v.ids.get('eos')}, only 1 and 2"
    elif v.tokens[3:259] != [b"<0x%02X>" % b for b in range(256)]:
        problem = "a tokenizer without byte tokens at ids 3 to 258"
    if problem:
        raise ExportError(f"a .bin cannot hold {problem}: export to .gguf instead")


def write_tokenizer_bin(path, v):
    """u32 length of the longest token, then for each token f32 score, i32 length, the bytes."""
    texts = [t.replace(SPACE.encode(), b" ") or b"[EMPTY_%d]" % i for i, t in enumerate(v.tokens)]
    texts[1:3] = b"\n<s>\n", b"\n</s>\n"
    with open(path, "wb") as f:
        f.write(struct.pack("<I", max(map(len, texts))))
        for score, text in zip(v.scores, texts):
            f.write(struct.pack("<fi", score, len(text)) + text)


def quantize_groups(x, size):
    import numpy as np
    groups = x.reshape(-1, size)
    scale = np.abs(groups).max(axis=1) / np.float32(127)
    divisor = np.where(scale == 0, np.float32(1), scale)        # a group of zeros stays zeros
    q = np.rint(groups / divisor[:, None])                      # half to even
    return [np.clip(q, -127, 127).astype(np.int8), scale]


def rope_tables(p):
    """Cosines and sines, which version 0 carries though no program reads them today."""
    import numpy as np
    inv_freq = p.rope_theta ** (-np.arange(0, p.head_dim, 2) / p.head_dim)
    angle = np.outer(np.arange(p.max_seq_len), inv_freq)
    return [np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)]


def bin_order(p, version):
    """Tensors in file order; None stands for version 0's tables."""
    def layers(*roles):
        return [f"blk.{i}.{role}.weight" for role in roles for i in range(p.n_layers)]

    embedding, norm = "token_embd.weight", "output_norm.weight"
    last = [] if p.tied else ["output.weight"]
    attention = "attn_q", "attn_k", "attn_v", "attn_output"
    ffn = "ffn_gate", "ffn_down", "ffn_up"
    if version == 0:
        return [embedding, *layers("attn_norm", *attention, "ffn_norm", *ffn), norm, None, *last]
    return [*layers("attn_norm", "ffn_norm"), norm, embedding, *layers(*attention, *ffn), *last]


def write_bin(path, model, version):
    p = model.params
    vocab = -p.vocab_size if version == 0 and not p.tied else p.vocab_size
    group = math.gcd(64, p.dim, p.hidden_dim)       # a group must not reach into the next row
    header = struct.pack("<7i", p.dim, p.hidden_dim, p.n_layers, p.n_heads, p.n_kv_heads, vocab,
                         p.max_seq_len)
    if version > 0:
        header = struct.pack("<Ii", 0x616b3432, version) + header + struct.pack("<B", p.tied)
        header += struct.pack("<i", group) if version == 2 else b""
        header = header.ljust(256, b"\0")
    order = bin_order(p, version)
    with open(path, "wb") as f:
        f.write(header)
        for i, name in enumerate(order, 1):
            arrays = rope_tables(p) if name is None else [model.load(name)]
            if version == 2 and arrays[0].ndim == 2:
                arrays = quantize_groups(arrays[0], group)
            for x in arrays:
                f.write(x.astype(x.dtype.newbyteorder("<"), copy=False).data)
            log.progress(i, len(order), name or "rope tables")


# ---- Command line -------------------------------------------------------------------------------

def positive(text):
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def id_list(text):
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ids such as 2 or 2,1")
    return [int(i) for i in text.split(",")]


def parse_args(argv):
    ap = argparse.ArgumentParser(
        prog="export.py", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="export.py OUT (--hf DIR | --meta-llama DIR | --checkpoint FILE) [options]\n"
              "       export.py OUT --tokenizer FILE [--vocab-only]",
        description="\n\n".join(__doc__.split("\n\n")[:2]),
        epilog="Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.")
    ap.add_argument("out", metavar="OUT", type=Path, help="file to write; .gguf or .bin decides "
                    "the kind; NAME.bin of a checkpoint brings NAME.tokenizer.bin")
    source = ap.add_mutually_exclusive_group()
    source.add_argument("--hf", metavar="DIR", type=Path,
                        help="Hugging Face folder: config.json, safetensors, tokenizer")
    source.add_argument("--meta-llama", metavar="DIR", type=Path, dest="meta",
                        help="Meta folder: params.json, consolidated.*.pth, tokenizer.model")
    source.add_argument("--checkpoint", metavar="FILE", type=Path,
                        help="checkpoint of llama2.c's training (.pt)")
    ap.add_argument("--type", choices=["f32", "f16", "bf16", "q8_0", "q6_K", "q4_K", "q4_0"],
                    help="type of the weights in a GGUF (default: the checkpoint's own, float16 or "
                         "bfloat16 for a quantised one); q4_K has the most sensitive matrices in "
                         "q6_K; experts in MXFP4 stay as they are, but for f32")
    ap.add_argument("--lora", metavar="DIR", type=Path,
                    help="peft adapter to merge: adapter_config.json, adapter_model.safetensors")
    ap.add_argument("--version", type=int, choices=[0, 1, 2],
                    help="format of a .bin: 0 and 1 float32, 2 int8 (default: 0)")
    ap.add_argument("--tokenizer", metavar="FILE", type=Path,
                    help="tokenizer.model, tokenizer.json or a GGUF to take the tokenizer from "
                         "(default: the folder's); without a checkpoint, converted alone")
    ap.add_argument("--vocab-only", action="store_true", help="write a GGUF of the tokenizer alone")
    ap.add_argument("--context", metavar="N", type=positive,
                    help="context length to store (default: the checkpoint's)")
    ap.add_argument("--eos", metavar="ID,...", type=id_list,
                    help="ids that end a text, the main one first (default: the checkpoint's)")
    ap.add_argument("--pre", metavar="NAME", help="GGUF's name for the splitting rule of a "
                    "byte-level tokenizer (default: recognised)")
    ap.add_argument("--name", help="name of the model in a GGUF (default: the folder's or OUT's)")
    ap.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    a = ap.parse_args(argv)
    binary, model = a.out.suffix == ".bin", a.hf or a.meta or a.checkpoint
    for wrong, message in (
            (a.out.suffix not in (".gguf", ".bin"),
             f"OUT is {str(a.out)!r}, expected a name that ends in .gguf or .bin"),
            (not binary and a.version is not None, "--version is for .bin, a GGUF takes --type"),
            (binary and a.type, "--type is for GGUF, a .bin takes --version"),
            (binary and a.vocab_only, "--vocab-only is for GGUF; for a .bin, --tokenizer alone"),
            (binary and a.eos, "--eos is for GGUF, a .bin has no place for it"),
            (not model and not a.tokenizer, "nothing to export: give --hf, --meta-llama, "
                                            "--checkpoint or --tokenizer"),
            (not model and not binary and not a.vocab_only,
             "a GGUF of --tokenizer alone needs --vocab-only"),
            (a.lora and (not a.hf or a.vocab_only), "--lora is for the weights of --hf"),
            (a.vocab_only and a.type, "--type does not go with --vocab-only"),
            (not model and a.version is not None, "--version does not go with a tokenizer alone")):
        if wrong:
            ap.error(message)
    return a


def load_model(a):
    with parsing(a.hf or a.meta or a.checkpoint):
        if a.hf:
            return load_hf(a.hf, a.lora)
        return load_meta(a.meta) if a.meta else load_pt(a.checkpoint)


def find_vocab(a):
    """The tokenizer to use; None for a training checkpoint, which has none beside it."""
    place = a.tokenizer or a.hf or a.meta
    v = place and load_vocab(place, a.pre)
    if place and not v:
        raise ExportError(f"{place}: no tokenizer.model or tokenizer.json: give --tokenizer FILE")
    return v


def keep_inputs(a, outputs):
    """No output may replace a file that is read, nor the original weights beside it."""
    inputs = [f for f in (a.tokenizer, a.checkpoint) if f]
    for folder in filter(None, (a.hf, a.meta, a.lora)):
        if folder.is_dir():     # earlier outputs may lie there too
            inputs += [f for f in folder.iterdir() if f.resolve().suffix not in (".gguf", ".bin")
                       or re.match("(pytorch|adapter)_model", f.name)]
    with contextlib.suppress(ExportError):
        inputs += weight_files(a.hf) if a.hf else []
    real = {os.path.realpath(f) for f in inputs}
    for out in outputs:
        if os.path.realpath(out) in real:
            raise ExportError(f"{out}: is an input, which would be replaced: give another OUT")


def run_gguf(a):
    keep_inputs(a, [a.out])
    model = None if a.vocab_only else load_model(a)
    params = model and model.params
    if a.vocab_only and a.hf:       # the shape is welcome but not needed
        with contextlib.suppress(ExportError), parsing("config.json"):
            params = hf_params(read_json(a.hf / "config.json"), "config.json")
    if params:
        params.max_seq_len = a.context or params.max_seq_len
    v, stops = find_vocab(a), a.eos
    if not v:
        raise ExportError(f"{a.checkpoint}: holds no tokenizer: give one with --tokenizer FILE")
    if a.checkpoint and not stops:      # llama2.c's models end a story with the BOS of the next
        stops = [v.ids[role] for role in ("eos", "bos") if role in v.ids]
    with parsing(a.hf or a.tokenizer or a.meta):
        finish_vocab(v, a.hf, model and params.vocab_size, stops)
    with whole_file(a.out) as part:
        write_gguf(part, model, params, v, a)
    return [a.out]


def run_bin(a):
    tokenizer_out = a.out.with_suffix(".tokenizer.bin") if a.hf or a.meta or a.checkpoint else a.out
    keep_inputs(a, [a.out, tokenizer_out])
    model = load_model(a) if a.hf or a.meta or a.checkpoint else None
    v = find_vocab(a)
    if model:
        model.params.max_seq_len = a.context or model.params.max_seq_len
        check_bin(model.params)
    if model and v:
        v.fit(model.params.vocab_size, a.tokenizer or a.hf or a.meta)
    elif model:
        log.note("no tokenizer here, so none is written; --tokenizer FILE gives one")
    with contextlib.ExitStack() as stack:
        if v:
            check_bin_vocab(v)
            write_tokenizer_bin(stack.enter_context(whole_file(tokenizer_out)), v)
        if model:
            write_bin(stack.enter_context(whole_file(a.out)), model, a.version or 0)
    return [a.out] * bool(model) + [tokenizer_out] * bool(v)


def main(argv=None):
    args = parse_args(argv)
    log.quiet = args.quiet
    try:
        package("numpy")
        for path in run_gguf(args) if args.out.suffix == ".gguf" else run_bin(args):
            log.note(f"wrote {path}, {path.stat().st_size:,} bytes")
    except ExportError as e:
        message = str(e)
    except OSError as e:
        message = f"{e.filename}: {e.strerror}" if e.filename else str(e)
    except MemoryError:
        message = "out of memory"
    except KeyboardInterrupt:
        return 130
    else:
        return 0
    print(f"export.py: error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
