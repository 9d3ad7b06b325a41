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
import json
import math
import os
import re
import struct
import sys
from dataclasses import dataclass, field
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
    except (TypeError, AttributeError, ValueError, IndexError, ArithmeticError) as e:
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
# A new architecture is one row of ARCHS, and a row or column of LAYER where its tensors differ.

@dataclass
class Arch:
    gguf: str        # general.architecture
    permute: bool    # GGUF has rotated pairs side by side, Hugging Face half a head apart
    defaults: dict   # what transformers assumes where config.json is silent


ARCHS = {
    "LlamaForCausalLM": Arch("llama", True, {}),
    "MistralForCausalLM": Arch("llama", True, {"num_key_value_heads": 8, "sliding_window": 4096}),
}

# GGUF name, Hugging Face name, Meta and llama2.c name, shape (rows, columns), flag of its bias
OUTER = [
    ("token_embd", "embed_tokens", "tok_embeddings", "vocab dim", ""),
    ("output_norm", "norm", "norm", "dim", ""),
    ("output", "lm_head", "output", "vocab dim", ""),
]
LAYER = [
    ("attn_norm", "input_layernorm", "attention_norm", "dim", ""),
    ("attn_q", "self_attn.q_proj", "attention.wq", "q dim", "attention_bias"),
    ("attn_k", "self_attn.k_proj", "attention.wk", "kv dim", "attention_bias"),
    ("attn_v", "self_attn.v_proj", "attention.wv", "kv dim", "attention_bias"),
    ("attn_output", "self_attn.o_proj", "attention.wo", "dim q", "attention_bias"),
    ("ffn_norm", "post_attention_layernorm", "ffn_norm", "dim", ""),
    ("ffn_gate", "mlp.gate_proj", "feed_forward.w1", "hidden dim", "mlp_bias"),
    ("ffn_up", "mlp.up_proj", "feed_forward.w3", "hidden dim", "mlp_bias"),
    ("ffn_down", "mlp.down_proj", "feed_forward.w2", "dim hidden", "mlp_bias"),
]
HF, META = 1, 2     # columns of these tables
# Buffers that older checkpoints carry along; they follow from the configuration.
BUFFERS = re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|rope\.freqs|freqs_(cos|sin)")


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
    rope_theta: float = 10000.0
    rope: dict = field(default_factory=lambda: {"rope_type": "default"})    # as in config.json
    tied: bool = False               # the classifier is the embedding
    attention_bias: bool = False
    mlp_bias: bool = False
    window: int = 0                  # sliding window of all layers, 0: none
    arch: Arch = None

    def check(self, where):
        for name, kind in self.__annotations__.items():
            value = getattr(self, name)
            if kind in (int, float) and name != "window" and not (
                    type(value) in (int, kind) and 0 < value < 2**31):
                raise ExportError(f"{where}: {name} is {value!r}, expected a positive number")
        if self.n_heads % self.n_kv_heads:
            raise ExportError(f"{where}: {self.n_heads} heads cannot share {self.n_kv_heads} key "
                              "and value heads evenly")
        if self.head_dim % 2:
            raise ExportError(f"{where}: head size {self.head_dim} is odd, rotation needs pairs")

    def shape(self, spec):
        size = {"vocab": self.vocab_size, "dim": self.dim, "hidden": self.hidden_dim,
                "q": self.n_heads * self.head_dim, "kv": self.n_kv_heads * self.head_dim}
        return tuple(size[s] for s in spec.split())


class Model:
    """Parameters and checked access to the weights, one tensor at a time, in GGUF's row order."""

    def __init__(self, params, source, naming):
        self.params, self.source = params, source
        if params.n_layers > len(source.shapes):
            raise ExportError(f"{source.where}: {params.n_layers} layers, but only "
                              f"{len(source.shapes)} tensors")
        self.table = {}     # GGUF name -> (name in the source, shape, heads to be permuted)
        rows = [("", "", row) for row in OUTER if row[0] != "output" or not params.tied]
        rows += [(f"blk.{i}.", f"layers.{i}.", r) for i in range(params.n_layers) for r in LAYER]
        permuted = {"attn_q": params.n_heads, "attn_k": params.n_kv_heads}
        for mine, theirs, row in rows:
            heads = permuted.get(row[0], 0) if naming == HF and params.arch.permute else 0
            name, shape = theirs + row[naming], params.shape(row[3])
            self.table[f"{mine}{row[0]}.weight"] = f"{name}.weight", shape, heads
            if row[4] and getattr(params, row[4]):
                self.table[f"{mine}{row[0]}.bias"] = f"{name}.bias", shape[:1], heads
        self.check()

    def check(self):
        """Every tensor is there once, in the shape that the configuration says, and no other."""
        wanted = {name: shape for name, shape, _ in self.table.values()}
        found, where = self.source.shapes, self.source.where
        spare = ("lm_head.weight", "output.weight") if self.params.tied else ()
        missing = [n for n in wanted if n not in found]
        unknown = [n for n in found
                   if n not in wanted and n not in spare and not BUFFERS.fullmatch(n)]
        if missing or unknown:
            raise ExportError(f"{where}: tensor {'missing' if missing else 'unknown'}: "
                              + listing(missing or unknown))
        for name, shape in wanted.items():
            if found[name] != shape:
                raise ExportError(f"{where}: {name} has shape {list(found[name])}, expected "
                                  f"{list(shape)}")

    def load(self, name):
        import numpy as np
        source, shape, heads = self.table[name]
        x = np.ascontiguousarray(self.source.read(source), dtype=np.float32)
        if not np.isfinite(x).all():
            at = np.unravel_index(np.argmin(np.isfinite(x)), x.shape)
            raise ExportError(f"{self.source.where}: {source} holds {x[at]} at "
                              f"{[int(i) for i in at]}, expected finite numbers")
        if heads:   # rows i and i + half of each head become rows 2i and 2i + 1
            pairs = x.reshape(heads, 2, self.params.head_dim // 2, -1)
            x = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(shape)
        return x


# ---- Weight files -------------------------------------------------------------------------------
#
# A source has where (for messages), shapes {name: tuple}, dtype(name) and read(name) -> array.

def plain_name(name):
    """Without the wrappers that frameworks put around a model."""
    return re.sub(r"^(_orig_mod\.)?(model\.)?", "", name)


class Safetensors:
    TYPES = {"F32": ("<f4", "f32"), "F16": ("<f2", "f16"), "BF16": ("<u2", "bf16")}

    def __init__(self, folder, files):
        self.where, self.shapes, self.info = str(folder), {}, {}
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
                self.shapes[name] = tuple(info["shape"])

    def dtype(self, name):
        return self.TYPES[self.info[name][1]][1]

    def read(self, name):
        import numpy as np
        path, kind, offset = self.info[name]
        x = np.fromfile(path, self.TYPES[kind][0], math.prod(self.shapes[name]), offset=offset)
        if kind == "BF16":      # numpy has no bfloat16: it is the upper half of a float32
            x = (x.astype("<u4") << 16).view("<f4")
        return x.reshape(self.shapes[name])


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


def hf_rope(config, where):
    """Base and scaling, from transformers 5's rope_parameters or the older pair of keys."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    needs = {"default": (), "dynamic": (), "linear": ("factor",), "yarn": ("factor",),
             "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                        "original_max_position_embeddings")}
    if kind not in needs:
        raise ExportError(f"{where}: rope_type {kind} is not supported, known are "
                          + ", ".join(needs))
    for key in needs[kind]:
        if not isinstance(rope.get(key), (int, float)) or not 0 < rope[key] < math.inf:
            raise ExportError(f"{where}: {key} of rope_type {kind} is {rope.get(key)!r}, expected "
                              "a positive number")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ExportError(f"{where}: low_freq_factor is not below high_freq_factor")
    if (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        raise ExportError(f"{where}: partial_rotary_factor is not supported for this architecture")
    if kind == "dynamic":
        log.note("dynamic rope scaling changes nothing within the trained context: not stored")
        rope["rope_type"] = "default"
    return theta, rope


def hf_params(config, where):
    name = (config.get("architectures") or [f"of type {config.get('model_type')}"])[0]
    if name not in ARCHS:
        raise ExportError(f"{where}: architecture {name} is not supported, known are "
                          + ", ".join(ARCHS))
    arch = ARCHS[name]
    config = {**arch.defaults, **config}
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise ExportError(f"{where}: the weights are quantised ({method}), expected float weights")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ExportError(f"{where}: hidden_act is {config['hidden_act']}, expected silu")
    theta, rope = hf_rope(config, where)
    dim, n_heads = config["hidden_size"], config["num_attention_heads"]
    p = Params(
        dim=dim, hidden_dim=config["intermediate_size"], n_layers=config["num_hidden_layers"],
        n_heads=n_heads, n_kv_heads=config.get("num_key_value_heads") or n_heads,
        head_dim=config.get("head_dim") or dim // n_heads,
        vocab_size=config.get("vocab_size") or 1,       # the embedding will correct it
        max_seq_len=config.get("max_position_embeddings", 2048),
        norm_eps=config.get("rms_norm_eps", 1e-6), rope_theta=theta, rope=rope,
        tied=bool(config.get("tie_word_embeddings")),
        attention_bias=bool(config.get("attention_bias")), mlp_bias=bool(config.get("mlp_bias")),
        window=config.get("sliding_window") or 0, arch=arch)
    p.check(where)
    return p


def rows_of(source, name):
    if len(source.shapes.get(name, ())) != 2:
        raise ExportError(f"{source.where}: tensor missing: {name}")
    return source.shapes[name][0]


def load_hf(folder):
    where = folder / "config.json"
    config = read_json(where, True)
    with parsing(where):
        p = hf_params(config, where)
    source = Safetensors(folder, weight_files(folder))
    rows = rows_of(source, "embed_tokens.weight")
    if config.get("vocab_size", rows) != rows:
        log.note(f"{where}: vocab_size is {p.vocab_size}, using the embedding's {rows} rows")
    p.vocab_size = rows
    if "lm_head.weight" not in source.shapes and "tie_word_embeddings" not in config:
        log.note("no lm_head.weight and no tie_word_embeddings: the embedding is the classifier")
        p.tied = True
    return Model(p, source, HF)


def meta_model(args, source, where, max_seq_len, rope=None):
    """A Meta or llama2.c checkpoint; sizes that the weights show are read there."""
    import numpy as np
    with parsing(where):
        p = Params(
            dim=args["dim"], hidden_dim=rows_of(source, "layers.0.feed_forward.w1.weight"),
            n_layers=args["n_layers"], n_heads=args["n_heads"],
            n_kv_heads=args.get("n_kv_heads") or args["n_heads"],
            head_dim=args["dim"] // args["n_heads"],
            vocab_size=rows_of(source, "tok_embeddings.weight"), max_seq_len=max_seq_len,
            norm_eps=args.get("norm_eps", 1e-5), rope_theta=args.get("rope_theta") or 10000.0,
            arch=ARCHS["LlamaForCausalLM"])
        p.check(where)
    p.rope = rope or p.rope
    shapes, (ours, theirs) = source.shapes, ("output.weight", "tok_embeddings.weight")
    p.tied = ours not in shapes or (shapes[ours] == shapes[theirs] and bool(
        np.array_equal(source.read(ours), source.read(theirs))))
    return Model(p, source, META)


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
            axes[name] = int(name.split(".")[-2] in ("wo", "w2"))
            if name == "tok_embeddings.weight":     # Llama 1, 2: the width; 3: the vocabulary
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
    if unsaid:
        log.note(f"{path}: GGUF cannot say {', '.join(unsaid)}: ids of some texts will differ")
    rank = {}       # SentencePiece's scores are lost here; the order of the merges stands for them
    for i, (a, b) in enumerate(merges):
        rank.setdefault(a + b, i)
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
    """A name to write to, which becomes path only if all goes well."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_params(w, p):
    for add, value in (
            (w.add_context_length, p.max_seq_len), (w.add_embedding_length, p.dim),
            (w.add_block_count, p.n_layers), (w.add_feed_forward_length, p.hidden_dim),
            (w.add_head_count, p.n_heads), (w.add_head_count_kv, p.n_kv_heads),
            (w.add_key_length, p.head_dim), (w.add_value_length, p.head_dim),
            (w.add_layer_norm_rms_eps, p.norm_eps), (w.add_rope_dimension_count, p.head_dim),
            (w.add_rope_freq_base, p.rope_theta), (w.add_vocab_size, p.vocab_size)):
        add(value)
    kind, rope = p.rope["rope_type"], p.rope
    if kind in ("linear", "yarn"):
        w.add_rope_scaling_type(package("gguf").RopeScalingType(kind))
        w.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        w.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings")
                                        or p.max_seq_len)
        for key, add in (("attention_factor", w.add_rope_scaling_yarn_attn_factor),
                         ("beta_fast", w.add_rope_scaling_yarn_beta_fast),
                         ("beta_slow", w.add_rope_scaling_yarn_beta_slow)):
            if rope.get(key) is not None:
                add(rope[key])


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
        if type(generation.get(key)) in (int, float):
            add(kind(generation[key]))


def llama3_divisors(p):
    """Llama 3.1's scaling: slow rotations are slowed by factor, fast ones kept, a ramp between."""
    import numpy as np
    low, high, old, factor = (p.rope[k] for k in (
        "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "factor"))
    inv_freq = p.rope_theta ** (-np.arange(0, p.head_dim, 2) / p.head_dim)
    smooth = np.clip((old * inv_freq / (2 * np.pi) - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def storage_type(name, shape, wanted, tied):
    """The GGUF type of one tensor. The classifier stays at 8 bits in a 4-bit file: it decides
    every token, and rounding it costs more than the bytes it would save."""
    types = package("gguf").GGMLQuantizationType
    if len(shape) == 1:
        return types.F32
    if wanted in ("q8_0", "q4_0"):
        if shape[-1] % 32:
            return types.F16
        if name == ("token_embd.weight" if tied else "output.weight"):
            return types.Q8_0
    return types[wanted.upper()]


def encode(x, kind, name):
    import numpy as np
    limit = {"F16": 65504.0, "Q8_0": 65504.0 * 127, "Q4_0": 65504.0 * 8}.get(kind.name, math.inf)
    biggest = max(float(x.max()), -float(x.min()))
    if biggest > limit:     # the quantised types have a float16 scale
        raise ExportError(f"{name}: value {biggest:g} does not fit {kind.name.lower()}, at most "
                          f"{limit:g}: use --type bf16 or f32")
    return np.ascontiguousarray(package("gguf").quants.quantize(x, kind))


def write_gguf(path, model, params, v, a):
    """Without a model: the tokenizer alone; without params: nothing known of a model."""
    gguf = package("gguf")
    w = gguf.GGUFWriter(path, params.arch.gguf if params else "llama")
    w.add_type("model")
    w.add_name(a.name or (a.hf.resolve().name if a.hf else a.out.stem))
    plan = []
    if params:
        write_params(w, params)
    if model:
        wanted = a.type or model.source.dtype(model.table["token_embd.weight"][0])
        plan = [(name, shape, storage_type(name, shape, wanted, params.tied))
                for name, (_, shape, _) in model.table.items()]
        if params.rope["rope_type"] == "llama3":
            plan.append(("rope_freqs.weight", (params.head_dim // 2,), plan[1][2]))     # f32
        w.add_file_type({"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}[wanted])
        if wanted[0] == "q":
            w.add_quantization_version(gguf.GGML_QUANT_VERSION)
            kept = [name for name, _, kind in plan if kind.name == "F16"]
            if kept:
                log.note(f"rows are not a multiple of 32, stored as f16: {listing(kept)}")
    write_vocab(w, v)
    write_sampling(w, read_json(a.hf / "generation_config.json") if a.hf else {})
    for name, shape, kind in plan:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        w.add_tensor_info(name, shape, "float32", math.prod(shape) // block * size, kind)
    try:
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_ti_data_to_file()
        for i, (name, shape, kind) in enumerate(plan, 1):
            x = llama3_divisors(params) if name == "rope_freqs.weight" else model.load(name)
            w.write_tensor_data(encode(x, kind, name))
            log.progress(i, len(plan), name)
    finally:
        w.close()


# ---- Writing .bin -------------------------------------------------------------------------------

def check_bin(p):
    """A .bin has no field for these and its readers take one value: another is wrong text."""
    for name, found, expected in (
            ("rope_theta", p.rope_theta, 10000), ("rope scaling", p.rope["rope_type"], "default"),
            ("head size", p.head_dim, p.dim / p.n_heads), ("norm eps", round(p.norm_eps, 9), 1e-5),
            ("attention_bias", p.attention_bias, False), ("mlp_bias", p.mlp_bias, False)):
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
    ap.add_argument("--type", choices=["f32", "f16", "bf16", "q8_0", "q4_0"],
                    help="type of the weights in a GGUF (default: the checkpoint's own)")
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
            (a.vocab_only and a.type, "--type does not go with --vocab-only"),
            (not model and a.version is not None, "--version does not go with a tokenizer alone")):
        if wrong:
            ap.error(message)
    return a


def load_model(a):
    with parsing(a.hf or a.meta or a.checkpoint):
        return load_hf(a.hf) if a.hf else load_meta(a.meta) if a.meta else load_pt(a.checkpoint)


def find_vocab(a):
    """The tokenizer to use; None for a training checkpoint, which has none beside it."""
    place = a.tokenizer or a.hf or a.meta
    v = place and load_vocab(place, a.pre)
    if place and not v:
        raise ExportError(f"{place}: no tokenizer.model or tokenizer.json: give --tokenizer FILE")
    return v


def run_gguf(a):
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
    finish_vocab(v, a.hf, model and params.vocab_size, stops)
    if model and 0 < params.window < params.max_seq_len:
        log.note(f"GGUF has no place for the sliding window: texts over {params.window} tokens "
                 "will get full attention")
    with whole_file(a.out) as part:
        write_gguf(part, model, params, v, a)
    return [a.out]


def run_bin(a):
    model = load_model(a) if a.hf or a.meta or a.checkpoint else None
    v = find_vocab(a)
    if model:
        model.params.max_seq_len = a.context or model.params.max_seq_len
        check_bin(model.params)
    if model and v:
        v.fit(model.params.vocab_size, a.tokenizer or a.hf or a.meta)
    elif model:
        log.note("no tokenizer here, so none is written; --tokenizer FILE gives one")
    tokenizer_out = a.out.with_suffix(".tokenizer.bin") if model else a.out
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
