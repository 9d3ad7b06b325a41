#!/usr/bin/env python3
"""Make every fixture of this folder again, from nothing but fixed seeds and the references.

    python tests/make.py [PART ...] [--check] [--llama2c DIR] [--llamacpp DIR] [--story FILE] [--spm FILE]

Parts, all of them by default: models families split quants kquant bins blocks bpe tokens parity real
--check      test what is there instead of writing: a float64 forward pass over each exported file,
             written independently of the program, must give the reference; the text files must come
             out the same again (kinds that need a missing folder are skipped, said so)
--llama2c    karpathy/llama2.c, a source folder: its run.c is built for `parity`, its tokenizer.model
             (the Llama 2 vocabulary) is the reference of `tokens`
--llamacpp   a llama.cpp source folder: its golden ids are compared with ours in `tokens`
--story      the story model as .bin, its .tokenizer.bin beside it (models/story.bin)
--spm        tokenizer.model of the story model (else rebuilt from models/story.gguf)

`real` needs the files of models/real (sh models/fetch.sh smollm2|gemma3|coder05); templates.txt is made by templates.py.

Pinned: torch 2.13.0 (CPU), transformers 5.24.0, tokenizers 0.23.3, sentencepiece 0.2.3, gguf 0.19.0,
safetensors 0.8.0, numpy 2.4.6, accelerate 1.15.0.

The formats
  NAME.ref       line 1 `runc-ref N V E L R`: positions, vocabulary, width, layers, residual rows; line
                 2 the N token ids; line 3 the R row numbers; then raw little-endian float32: logits
                 [N][V], and for each layer the residual stream behind it at those rows [L][R][E]
  blocks.txt     `type hexbytes hexfloats`: one block (f16, bf16: 16 numbers) and the bits, big-endian
                 as one reads them, of its weights
  tokens.txt     `VOCAB PRE FLAGS hextext id id ...`: VOCAB bpe (tests/bpe.gguf), story
                 (models/story.gguf) or llama2 (tokenizer.bin); PRE the pre-tokeniser to force (- none);
                 FLAGS - or letters: b BOS in front, s control tokens in the text count, n the reference
                 normalises this text to NFC and that changes it, u U+2581 stands in the text, which
                 SentencePiece takes for a space; a line without letters decodes to its text again.
                 Empty text: `.`
  parity.txt     `KIND T P S N PROMPT OUT`: llama2.c's options -t -p -s -n, prompt and stdout in hex (prompt
                 . is none), for models/story.bin turned into a version 0 file (w = q * scale); KIND any:
                 the text does not hang on the last digits, story.bin itself must give it; f32: it may not
  REAL.ref.txt   (smollm2, gemma3, coder05) for each text `text FILE TOKENS NLL`, then a line a position, `nll argmax`: the
                 negative log-likelihood of the token there (the first has none: 0), and the best id
                 for the next position
"""
import argparse, os, pathlib, random, shutil, struct, subprocess, sys, tempfile, unicodedata

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
PINNED = dict(torch="2.13.0", transformers="5.24.0", tokenizers="0.23.3", sentencepiece="0.2.3",
              gguf="0.19.0", safetensors="0.8.0", numpy="2.4.6", accelerate="1.15.0")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import numpy as np
import gguf
from gguf.quants import dequantize, quantize
from families import (FAMILIES, OLD_SPELLING, exact_angles, forward64, gguf_weights, random_model, read_ref,
                      run_reference, save_checkpoint, some_ids, torch_one_thread, write_ref)
np.seterr(all="ignore")
T = gguf.GGMLQuantizationType
problems = []


def say(text):
    print(text, file=sys.stderr, flush=True)


def check(good, text):
    say(("  ok    " if good else "  WRONG ") + text)
    if not good:
        problems.append(text)


def write_text(name, text):
    """Write a text fixture, or under --check compare it with the one that is there."""
    path = HERE / name
    if ARGS.check:
        old = path.read_text(encoding="utf-8") if path.exists() else None
        check(old == text, f"{name}: comes out the same again")
    else:
        path.write_text(text, encoding="utf-8", newline="\n")
        say(f"  {name}: {len(text)} bytes, {text.count(chr(10))} lines")


def export(out, *options):
    """Run export.py of this project; quiet unless it fails."""
    run = subprocess.run([sys.executable, str(ROOT / "export.py"), str(out), *map(str, options)],
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        sys.exit(f"export.py failed for {out}:\n{run.stdout}")


# ------------------------------------------------------------------------------------------------
# Tiny checkpoints in Hugging Face form

def llama(seed, config):
    """A LlamaForCausalLM with random weights of unit gain: attention mixes, logits spread over a few nats."""
    torch = torch_one_thread()
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM
    transformers.utils.logging.disable_progress_bar()
    base = dict(rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, pad_token_id=None,
                attn_implementation="eager", dtype="float32")
    model = LlamaForCausalLM(LlamaConfig(**{**base, **config})).float().eval()
    rng = np.random.default_rng(seed)
    tied = config.get("tie_word_embeddings", False)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if "norm" in name:
                w = rng.uniform(0.6, 1.4, p.shape)
            elif name.endswith("bias"):
                w = rng.normal(0, 0.3, p.shape)
            elif "embed_tokens" in name:
                w = rng.normal(0, 0.4 if tied else 1.0, p.shape)
            else:
                gain = 1.5 if "q_proj" in name or "lm_head" in name else 1.0
                w = rng.normal(0, gain / np.sqrt(p.shape[1]), p.shape)
            p.copy_(torch.tensor(w, dtype=torch.float32))
    return model


def tiny_spm(folder, _size=None):
    """A SentencePiece BPE model with byte pieces, built by hand; returns its size."""
    model = spm_model([("<unk>", 0, 2), ("<s>", 0, 3), ("</s>", 0, 3)]
                      + [(f"<0x{b:02X}>", 0, 6) for b in range(256)]
                      + [(p, -i, 1) for i, p in enumerate("▁t he ▁a in ▁the an er ▁s on re nd ▁and".split()
                                                          + list("▁etaoinshrdlucmfwypvbgkjqxz.,"))])
    (folder / "tokenizer.model").write_bytes(model.SerializeToString())
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",'
        ' "add_bos_token": true, "add_eos_token": false, "legacy": false}')
    return len(model.pieces)


def spm_model(pieces):
    from sentencepiece import sentencepiece_model_pb2 as pb
    model = pb.ModelProto()
    model.trainer_spec.model_type = 2
    model.trainer_spec.byte_fallback = True
    model.trainer_spec.vocab_size = len(pieces)
    model.trainer_spec.unk_id, model.trainer_spec.bos_id, model.trainer_spec.eos_id = 0, 1, 2
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = True
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    for piece, score, kind in pieces:
        p = model.pieces.add()
        p.piece, p.score, p.type = piece, score, kind
    return model


def shape(vocab, dim, heads, kv, hidden, layers=2, head=None, **more):
    config = dict(vocab_size=vocab, hidden_size=dim, num_attention_heads=heads, num_key_value_heads=kv,
                  intermediate_size=hidden, num_hidden_layers=layers, max_position_embeddings=256,
                  rope_parameters=dict(rope_type="default", rope_theta=10000.0), tie_word_embeddings=False)
    if head:
        config["head_dim"] = head
    return {**config, **more}


# name: (seed, positions, rows of the residual stream, configuration)
MODELS = {
    "gqa": (1, 64, [0, 1, 31, 63], shape(64, 48, 6, 2, 40, head=8, layers=3)),
    "odd": (2, 61, [0, 1, 30, 60], shape(61, 36, 3, 3, 45, head=12)),
    "mqa-tied": (3, 80, [0, 1, 40, 79], shape(50, 40, 4, 1, 52, head=16, tie_word_embeddings=True,
                 rope_parameters=dict(rope_type="default", rope_theta=100000.0), rms_norm_eps=1e-2)),
    "bias": (4, 48, [0, 1, 24, 47], shape(48, 32, 4, 2, 56, attention_bias=True, mlp_bias=True)),
    "rope3": (5, 1230, [0, 15, 16, 63, 64, 255, 511, 512, 1023, 1024, 1200, 1229],
              shape(40, 32, 2, 1, 48, head=32, max_position_embeddings=2048,
                    rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0,
                                         high_freq_factor=4.0, original_max_position_embeddings=64))),
    "linear": (6, 96, [0, 1, 48, 95], shape(48, 32, 2, 2, 48, rope_parameters=dict(
               rope_type="linear", rope_theta=10000.0, factor=4.0))),
    "long": (7, 1120, [0, 1, 255, 256, 511, 512, 1023, 1024, 1119], shape(40, 32, 2, 1, 40, max_position_embeddings=2048,
             rope_parameters=dict(rope_type="default", rope_theta=1000000.0))),
}


def make_models(temp):
    for name, (seed, n, rows, config) in MODELS.items():
        if not ARGS.check:
            model = llama(seed, config)
            ids = some_ids(seed, n, config["vocab_size"])
            folder = save_checkpoint(model, temp / name, old_spelling=name == "linear")
            export(HERE / (name + ".gguf"), "--hf", folder, "--type", "f32")
            exact_angles(model)
            write_ref(HERE / (name + ".ref"), ids, *run_reference(model, ids), rows)
            say(f"  {name}: {(HERE / (name + '.gguf')).stat().st_size} + {(HERE / (name + '.ref')).stat().st_size} bytes")
        compare(name, HERE / (name + ".gguf"), 1e-4)


def make_families(temp):
    """One checkpoint of each family: config, safetensors and tokenizer as published, through export.py."""
    for name, (_, seed, n, rows, _, config) in FAMILIES.items():
        if not ARGS.check:
            model = random_model(name)
            exact_angles(model)
            ids = some_ids(seed, n, config["vocab_size"])
            folder = save_checkpoint(model, temp / name, old_spelling=name in OLD_SPELLING, mxfp4="mxfp4" in name)
            export(HERE / (name + ".gguf"), "--hf", folder, "--type", "f16")
            write_ref(HERE / (name + ".ref"), ids, *run_reference(model, ids), rows)
            say(f"  {name}: {(HERE / (name + '.gguf')).stat().st_size} + {(HERE / (name + '.ref')).stat().st_size} bytes")
        compare(name, HERE / (name + ".gguf"), 1e-4)


def make_split(_temp):
    """qwen3.gguf as a set of three files; the first holds the keys and no tensor, as such sets often do."""
    data = (HERE / "qwen3.gguf").read_bytes()
    tensors = gguf.GGUFReader(HERE / "qwen3.gguf").tensors
    n_keys, keys = struct.unpack_from("<Q", data, 16)[0], data[24:tensors[0].field.offset]
    half = len(tensors) // 2
    for no, part in enumerate(([], tensors[:half], tensors[half:])):
        infos, body = b"", b""
        for t in part:
            name = t.name.encode()
            body += b"\0" * (-len(body) % 32)
            infos += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *map(int, t.shape))
            infos += struct.pack("<IQ", t.tensor_type, len(body))
            body += data[t.data_offset:t.data_offset + t.n_bytes]
        split = b"".join(struct.pack("<Q", len(key)) + key + struct.pack("<IH", 2, value)
                         for key, value in ((b"split.no", no), (b"split.count", 3)))
        head = b"GGUF" + struct.pack("<IQQ", 3, len(part), 2 + n_keys * (no == 0)) + keys * (no == 0) + split + infos
        whole, path = head + b"\0" * (-len(head) % 32) + body, HERE / f"split-{no + 1:05}-of-00003.gguf"
        if ARGS.check:
            check(path.read_bytes() == whole, f"{path.name}: comes out the same again")
        else:
            path.write_bytes(whole)


# ------------------------------------------------------------------------------------------------
# Quantised files: the reference runs on the weights taken out of the file again

def rewrite(source, target, change, file_type=None):
    """Copy a GGUF; change(name, float32 rows) gives (bytes as uint8 rows, type), or None to keep it."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = field.contents()
        if key == "general.file_type" and file_type is not None:
            value = int(file_type)
        kind = field.types[0]
        writer.add_key_value(key, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        new = change(tensor.name, np.array(tensor.data)) if len(tensor.shape) > 1 else None
        if new is None:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        else:
            writer.add_tensor(tensor.name, new[0], raw_dtype=new[1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


NAMES = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def halves(w, heads):
    """Rows of adjacent rotary pairs back to Hugging Face's [first half | second half]."""
    d = w.shape[0] // heads
    return w.reshape(heads, d // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def hf_model(config, tensors, heads, kv_heads):
    """A LlamaForCausalLM from tensors under GGUF names (adjacent rotary pairs)."""
    torch = torch_one_thread()
    model = llama(0, config)
    state = {}
    for name, w in tensors.items():
        if name.startswith("blk."):
            _, layer, part, kind = name.split(".")
            if part in ("attn_q", "attn_k"):
                w = halves(w, heads if part == "attn_q" else kv_heads)
            state[f"model.layers.{layer}.{NAMES[part]}.{kind}"] = torch.tensor(w)
        else:
            state[{"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
                   "output.weight": "lm_head.weight"}[name]] = torch.tensor(w)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    if "lm_head.weight" not in state:
        assert model.config.tie_word_embeddings
        model.tie_weights()
    return model


def reference_of_file(name, config, ids, rows):
    _, tensors = gguf_weights(HERE / (name + ".gguf"))
    model = hf_model(config, tensors, config["num_attention_heads"], config["num_key_value_heads"])
    write_ref(HERE / (name + ".ref"), ids, *run_reference(model, ids), rows)
    say(f"  {name}: {(HERE / (name + '.gguf')).stat().st_size} + {(HERE / (name + '.ref')).stat().st_size} bytes")


QUANT = (8, 48, [0, 1, 24, 47], shape(64, 64, 2, 1, 96))


def make_quants(temp):
    seed, n, rows, config = QUANT
    ids = some_ids(seed, n, config["vocab_size"])
    if not ARGS.check:
        folder = save_checkpoint(llama(seed, config), temp / "quant")
        export(temp / "quant.gguf", "--hf", folder, "--type", "f32")
    for kind in ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"):
        name = "quant-" + kind
        if not ARGS.check:
            out = HERE / (name + ".gguf")
            if kind in ("f16", "bf16", "q8_0", "q4_0"):
                export(out, "--hf", folder, "--type", kind)
            else:
                q = T[kind.upper()]
                rewrite(temp / "quant.gguf", out, lambda _name, w: (quantize(w, q), q),
                        gguf.LlamaFileType["MOSTLY_" + kind.upper()])
            reference_of_file(name, config, ids, rows)
        compare(name, HERE / (name + ".gguf"), 1e-4)


KQUANT = (9, 40, [0, 1, 20, 39], shape(32, 256, 4, 1, 256, layers=1))


def random_block(rng, kind, count):
    """Random K-quant blocks whose weights are about 1/16 in size: random bytes, chosen scales."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    b = rng.integers(0, 256, (count, size), dtype=np.uint8)
    half = lambda x: np.asarray(x, "<f2").reshape(count, 1).view(np.uint8)
    wobble = rng.uniform(0.8, 1.25, count)
    if kind in (T.Q4_K, T.Q5_K):
        d = wobble * (2.4e-4 if kind == T.Q4_K else 1.2e-4)
        b[:, 0:2] = half(d)
        b[:, 2:4] = half(d * (7.5 if kind == T.Q4_K else 15.5))
    elif kind == T.Q6_K:
        b[:, 192:208] = rng.integers(-64, 65, (count, 16), dtype=np.int8).view(np.uint8)
        b[:, 208:210] = half(9e-5 * wobble * rng.choice([-1, 1], count))
    else:
        raise ValueError(kind)
    return b


def make_kquant(temp):
    seed, n, rows, config = KQUANT
    name = "kquant"
    if not ARGS.check:
        folder = save_checkpoint(llama(seed, config), temp / name)
        export(temp / "kquant.gguf", "--hf", folder, "--type", "f32")
        rng = np.random.default_rng(seed)
        kinds = {"token_embd": T.Q6_K, "output": T.Q5_K, "attn_q": T.Q4_K, "attn_k": T.Q5_K, "attn_v": T.Q6_K,
                 "attn_output": T.Q4_K, "ffn_gate": T.Q5_K, "ffn_up": T.Q4_K, "ffn_down": T.Q6_K}

        def change(tensor, w):
            kind = kinds[tensor.split(".")[-2]]
            blocks = random_block(rng, kind, w.size // 256)
            return blocks.reshape(w.shape[0], -1), kind

        rewrite(temp / "kquant.gguf", HERE / "kquant.gguf", change, gguf.LlamaFileType.MOSTLY_Q4_K_M)
        reference_of_file(name, config, some_ids(seed, n, config["vocab_size"]), rows)
    compare(name, HERE / (name + ".gguf"), 1e-4)


# ------------------------------------------------------------------------------------------------
# llama2.c's checkpoints

BIN = (10, 24, [0, 1, 12, 23])
CROSS = (11, 24, [0, 1, 12, 23])


def bin_shape(vocab, shared):
    return shape(vocab, 24, 3, 1, 40, tie_word_embeddings=shared, max_position_embeddings=64)


def read_bin(path):
    """(configuration, tensors under GGUF names) of a llama2.c file of any version, weights as float32."""
    raw = path.read_bytes()
    version, group, at = 0, 0, 28
    if struct.unpack_from("<I", raw)[0] == 0x616b3432:
        version = struct.unpack_from("<i", raw, 4)[0]
        dim, hidden, layers, heads, kv, vocab, seq, shared = struct.unpack_from("<7iB", raw, 8)
        group = struct.unpack_from("<i", raw, 37)[0] if version == 2 else 0
        at = 256
    else:
        dim, hidden, layers, heads, kv, vocab, seq = struct.unpack_from("<7i", raw)
        shared, vocab = vocab > 0, abs(vocab)
    head, config = dim // heads, shape(vocab, dim, heads, kv, hidden, layers, max_position_embeddings=seq,
                                       tie_word_embeddings=bool(shared))
    tensors = {}

    def take(name, *dims):
        nonlocal at
        n = int(np.prod(dims))
        if group and len(dims) == 2:
            q = np.frombuffer(raw, np.int8, n, at).astype(np.float32)
            s = np.frombuffer(raw, "<f4", n // group, at + n)
            w, at = q * np.repeat(s, group), at + n + 4 * (n // group)
        else:
            w, at = np.frombuffer(raw, "<f4", n, at).copy(), at + 4 * n
        tensors[name] = w.reshape(dims)

    def every(part, *dims):
        for layer in range(layers):
            take(f"blk.{layer}.{part}.weight", *dims)

    matrices = [("attn_q", dim, dim), ("attn_k", kv * head, dim), ("attn_v", kv * head, dim), ("attn_output", dim, dim)]
    ffn = [("ffn_gate", hidden, dim), ("ffn_down", dim, hidden), ("ffn_up", hidden, dim)]
    if version == 0:
        take("token_embd.weight", vocab, dim)
        every("attn_norm", dim)
        for m in matrices:
            every(*m)
        every("ffn_norm", dim)
        for m in ffn:
            every(*m)
        take("output_norm.weight", dim)
        at += 4 * seq * head
    else:
        every("attn_norm", dim)
        every("ffn_norm", dim)
        take("output_norm.weight", dim)
        take("token_embd.weight", vocab, dim)
        for m in matrices + ffn:
            every(*m)
    if not shared:
        take("output.weight", vocab, dim)
    assert at == len(raw), f"{path}: {len(raw)} bytes, {at} used"
    return config, tensors


def write_bin_v2(path, config, tensors, group):
    """Version 2 with any group size that divides every matrix as a whole (groups may cross rows)."""
    c = config
    layers = range(c["num_hidden_layers"])
    with open(path, "wb") as f:
        f.write(struct.pack("<Ii7iBi", 0x616b3432, 2, c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"],
                            c["num_attention_heads"], c["num_key_value_heads"], c["vocab_size"],
                            c["max_position_embeddings"], c["tie_word_embeddings"], group).ljust(256, b"\0"))
        for part in ("attn_norm", "ffn_norm"):
            for layer in layers:
                f.write(tensors[f"blk.{layer}.{part}.weight"].astype("<f4").tobytes())
        f.write(tensors["output_norm.weight"].astype("<f4").tobytes())
        order = ["token_embd.weight"] + [f"blk.{layer}.{part}.weight" for part in (
            "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_down", "ffn_up") for layer in layers]
        if not c["tie_word_embeddings"]:
            order.append("output.weight")
        for name in order:
            w = tensors[name].reshape(-1, group)
            scale = (np.abs(w).max(1) / np.float32(127)).astype(np.float32)
            q = np.rint(w / scale[:, None]).astype(np.int8)
            f.write(q.tobytes() + scale.astype("<f4").tobytes())


def write_bin_v0(path, config, tensors):
    c, layers = config, range(config["num_hidden_layers"])
    shared = c["tie_word_embeddings"]
    with open(path, "wb") as f:
        f.write(struct.pack("<7i", c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], c["num_attention_heads"],
                            c["num_key_value_heads"], c["vocab_size"] * (1 if shared else -1), c["max_position_embeddings"]))
        f.write(tensors["token_embd.weight"].astype("<f4").tobytes())
        for part in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_down", "ffn_up"):
            for layer in layers:
                f.write(tensors[f"blk.{layer}.{part}.weight"].astype("<f4").tobytes())
        f.write(tensors["output_norm.weight"].astype("<f4").tobytes())
        f.write(bytes(4 * c["max_position_embeddings"] * (c["hidden_size"] // c["num_attention_heads"])))
        if not shared:
            f.write(tensors["output.weight"].astype("<f4").tobytes())


def write_tokenizer_bin(path, spm_path):
    """llama2.c's tokenizer.bin from a SentencePiece model."""
    from sentencepiece import sentencepiece_model_pb2 as pb
    model = pb.ModelProto.FromString(spm_path.read_bytes())
    texts = [p.piece.replace("▁", " ").encode() for p in model.pieces]
    texts[1], texts[2] = b"\n<s>\n", b"\n</s>\n"
    with open(path, "wb") as f:
        f.write(struct.pack("<I", max(map(len, texts))))
        for p, text in zip(model.pieces, texts):
            f.write(struct.pack("<fi", p.score, len(text)) + text)


def make_bins(temp):
    def finish(name, config, ids, rows):
        found, tensors = read_bin(HERE / (name + ".bin"))
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                    "num_key_value_heads", "tie_word_embeddings", "max_position_embeddings"):
            assert found[key] == config[key], f"{name}: {key} is {found[key]}, expected {config[key]}"
        model = hf_model(config, tensors, config["num_attention_heads"], config["num_key_value_heads"])
        write_ref(HERE / (name + ".ref"), ids, *run_reference(model, ids), rows)
        say(f"  {name}: {(HERE / (name + '.bin')).stat().st_size} + {(HERE / (name + '.ref')).stat().st_size} bytes")

    vocab = tiny_spm(temp)
    seed, n, rows = BIN
    for shared in (True, False):
        config = bin_shape(vocab, shared)
        ids = some_ids(seed, n, vocab)
        if not ARGS.check:
            model = llama(seed, config)
            folder = save_checkpoint(model, temp / f"bin{shared:d}", tokenizer=tiny_spm)
        for version in (0, 1, 2):
            name = f"bin-v{version}" + ("" if shared else "-sep")
            out = HERE / (name + ".bin")
            if not ARGS.check:
                export(out, "--hf", folder, "--version", version)
                if version < 2:  # the reference is the checkpoint itself, not the file
                    write_ref(HERE / (name + ".ref"), ids, *run_reference(model, ids), rows)
                    say(f"  {name}: {out.stat().st_size} + {(HERE / (name + '.ref')).stat().st_size} bytes")
                else:
                    finish(name, config, ids, rows)
                write_tokenizer_bin(temp / "expected.tokenizer.bin", folder / "tokenizer.model")
                made = HERE / (name + ".tokenizer.bin")
                if made.exists():
                    check(made.read_bytes() == (temp / "expected.tokenizer.bin").read_bytes(),
                          f"{made.name}: export.py writes what the format says")
                else:
                    shutil.copy(temp / "expected.tokenizer.bin", made)
                    check(False, f"{made.name}: export.py did not write it (written here)")
            compare(name, out, 1e-4)
    # groups of 64 that cross the rows of w2 (172 wide), as in llama2.c's stories260K
    seed, n, rows = CROSS
    config = shape(vocab, 64, 8, 4, 172, tie_word_embeddings=True, max_position_embeddings=64)
    if not ARGS.check:
        model = llama(seed, config)
        folder = save_checkpoint(model, temp / "cross", tokenizer=tiny_spm)
        export(temp / "cross.bin", "--hf", folder, "--version", 0)
        write_bin_v2(HERE / "bin-v2-cross.bin", config, read_bin(temp / "cross.bin")[1], 64)
        write_tokenizer_bin(HERE / "bin-v2-cross.tokenizer.bin", folder / "tokenizer.model")
        finish("bin-v2-cross", config, some_ids(seed, n, vocab), rows)
    compare("bin-v2-cross", HERE / "bin-v2-cross.bin", 1e-4)


def compare(name, path, tolerance):
    """The file through forward64 against its .ref: the largest differences."""
    if not path.exists() or not (HERE / (name + ".ref")).exists():
        return check(False, f"{name}: missing")
    if path.suffix == ".gguf":
        fields, tensors = gguf_weights(path)
    else:
        c, tensors = read_bin(path)
        fields = {"general.architecture": "llama", "llama.block_count": c["num_hidden_layers"],
                  "llama.embedding_length": c["hidden_size"], "llama.attention.head_count": c["num_attention_heads"],
                  "llama.attention.head_count_kv": c["num_key_value_heads"],
                  "llama.attention.layer_norm_rms_epsilon": 1e-5}
    ids, rows, logits, hidden = read_ref(HERE / (name + ".ref"))
    mine, kept = forward64(fields, tensors, ids)
    if mine.shape != logits.shape:
        return check(False, f"{name}: logits {mine.shape}, reference {logits.shape}")
    e = np.abs(mine - logits)
    r = np.abs(kept[:, rows] - hidden).max()
    check(e.max() < tolerance and r < tolerance,
          f"{name}: logits differ by {e.max():.1e} (position {int(e.max(1).argmax())}), layers by {r:.1e}; "
          f"logits span {np.ptp(logits, axis=1).mean():.1f}")


# ------------------------------------------------------------------------------------------------
# blocks.txt

SCALES = {  # offsets of the half-precision fields: d, then m or dmin
    "f16": (), "bf16": (), "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q2_K": (80, 82),
    "q3_K": (108,), "q4_K": (0, 2), "q5_K": (0, 2), "q6_K": (208,), "iq4_nl": (0,), "iq4_xs": (0,), "tq1_0": (52,),
    "tq2_0": (64,), "mxfp4": ()}


def make_blocks(_temp):
    rng = np.random.default_rng(12)
    lines = []
    for kind, fields in SCALES.items():
        q = T[kind.upper()]
        count, size = gguf.GGML_QUANT_SIZES[q]
        repeat = 16 if count == 1 else 1
        fixed = np.array([(73 * i + 203 + (i * i >> 2)) % 256 for i in range(size * repeat)], np.uint8)
        for at, value in zip(fields, (0.0625, 0.25)):
            fixed[at:at + 2] = np.array([value], "<f2").view(np.uint8)
        if kind == "mxfp4":
            fixed[0] = 124
        blocks = [fixed]
        for turn in range(5 if size < 50 else 3):
            b = rng.integers(0, 256, size * repeat, dtype=np.uint8)
            for at in fields:  # ordinary, negative, subnormal and huge scales, zero
                value = [rng.normal(), -rng.uniform(1e-3, 0.1), 3e-7, 60000.0, 0.0][turn]
                b[at:at + 2] = np.array([value], "<f2").view(np.uint8)
            if kind == "mxfp4":
                b[0] = [120, 0, 1, 254, 128][turn]
            blocks.append(b)
        for b in blocks:
            if kind in ("f16", "bf16"):  # keep infinities, replace what would be a NaN (its bits are nobody's promise)
                u = b.view("<u2")
                top = 0x7c00 if kind == "f16" else 0x7f80
                u[(u & top) == top] &= 0x8000 | top
                if b is blocks[-1]:
                    u[:6] = [0, 0x8000, 1, 0x8001, top, 0x8000 | top]
            y = dequantize(b.reshape(1, -1) if count > 1 else b.view("<f2" if kind == "f16" else np.uint8).reshape(1, -1), q)
            y = np.asarray(y, np.float32).reshape(-1)
            assert len(y) == count * repeat and not np.isnan(y).any(), kind
            lines.append(f"{kind} {b.tobytes().hex()} {y.astype('>f4').tobytes().hex()}\n")
    write_text("blocks.txt", "".join(lines))


# ------------------------------------------------------------------------------------------------
# Tokenizers. The byte-level vocabulary is trained on strings that ignore every word boundary, so its
# merges reach across them: two pre-tokenisers that split differently give different ids.

CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
          "'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}")
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = "<think>"
UNMERGED = ["Ġlighthouse", "zebra", "ĠÃĸl", "ðŁĺĢ!"]  # tokens no merge can build: only a whole word finds them

JUNCTIONS = ["I'll", "don't", "we're", "DON'T", "It'S", "I'VE", "'s", "'T", " 'll", "x'd", "\n\n", "\n", "  ", "   ", "    ",
             "\t", "\t\t", "\r\n", "\r\n\r\n", " \n", "\n ", "\n  ", " \n\n ", "!!\n", "!\n", ".\n\n", "...", " ...", "?!", "(x)",
             " (", "_foo", "foo_bar", "[0]", "{}", "//", "->", "=>", "==", " != ", "://", "#include", "\u00a0x", "\u3000y", "12",
             "123", "1234", "12345678", " 7", " 2024", "3.50", "$3", "1,000", "½", "²", "٣", "Ⅷ", "é", "e\u0301", "ü", "Straße",
             "日本", "日本語", "テスト", "한국", "привет", "мир", "Ελλ", "שלום", "مرحبا", "हिन्दी", "ไทย", "😀", "👍🏽", "👩\u200d🚀", "❤\ufe0f"]


def training_strings():
    rng = random.Random(13)
    texts = [(HERE / "texts" / name).read_text(encoding="utf-8") for name in ("prose.txt", "code.txt", "mixed.txt")]
    out = []
    for _ in range(6000):
        text = rng.choice(texts)
        at = rng.randrange(len(text))
        out.append(text[at:at + rng.randint(2, 14)])
    words = "a the to and in of it is was on day red lamp sea end I we x".split()
    for _ in range(6000):
        out.append("".join(rng.choice(words) + rng.choice(JUNCTIONS) for _ in range(rng.randint(1, 3))) + rng.choice(words))
    return out


def train_bpe():
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    import json
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tok.train_from_iterator(training_strings(), trainers.BpeTrainer(
        vocab_size=700, min_frequency=2, special_tokens=CONTROL, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    model = json.loads(tok.to_str())["model"]
    tokens = [t for t, _ in sorted(model["vocab"].items(), key=lambda x: x[1])]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    tokens += UNMERGED + [USER_DEFINED]
    types = [3 if t in CONTROL else 4 if t == USER_DEFINED else 1 for t in tokens]
    return tokens, types, merges


def make_bpe(temp):
    """bpe.gguf: the vocabulary alone, by export.py --vocab-only from a tokenizer.json as SmolLM2's is built."""
    import json
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    tokens, types, merges = train_bpe()
    path = HERE / "bpe.gguf"
    if not ARGS.check:
        tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split(" ")) for m in merges]))
        tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
        tok.decoder = decoders.ByteLevel()
        tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
        tok.add_tokens([AddedToken(USER_DEFINED, special=False, normalized=False)])
        folder = temp / "bpe"
        folder.mkdir()
        tok.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(dict(
            tokenizer_class="GPT2Tokenizer", bos_token="<|im_start|>", eos_token="<|im_end|>", unk_token="<|endoftext|>",
            pad_token="<|im_end|>", add_bos_token=False, chat_template=CHATML)))
        export(path, "--hf", folder, "--vocab-only")
        say(f"  bpe.gguf: {path.stat().st_size} bytes, {len(tokens)} tokens, {len(merges)} merges")
    from real import gguf_fields
    f = gguf_fields(path)
    g = lambda key: f.get("tokenizer.ggml." + key)
    check(g("tokens") == tokens and g("merges") == merges and g("token_type") == types,
          f"bpe.gguf: tokens, merges and types are the trained ones ({len(tokens)}, {len(merges)})")
    check(g("model") == "gpt2" and g("pre") == "smollm" and g("eos_token_id") == 2 and not g("add_bos_token")
          and f.get("tokenizer.chat_template") == CHATML, "bpe.gguf: model, pre, eos, add_bos and template")


TEXTS = [
    "", " ", "  ", "   ", "    ", "\t", "\n", "\n\n", "\n\n\n", "\r", "\r\n", "\r\n\r\n", "\t\n", " \n", "\n ", "\n \n", " \n \n ",
    "\n\n x", " \n\n  x", "x \n", "x  \n\n  ", "a", "A", "é", "Hello world", " Hello world", "Hello, world!", "  two spaces",
    "trailing ", "trailing   ", "a  b", "a   b", "a\tb", "a\t\tb", "a \t b", "\ta", " \ta", "\t a", "a\nb", "a\n\nb", "a \n b",
    "a\r\nb", "a\r\n\r\nb \n c", "Hello  world\n\n  x", "   lead\ttab ",
    "I'll DON'T we'Re", "I'm you're he's we've they'd she'll isn't", "I'M YOU'RE HE'S WE'VE THEY'D SHE'LL ISN'T",
    "'s't're've'm'll'd", "'", "''", "'''", "'S 'sx x's' 'tis", "rock'n'roll o'clock", "’s ‘t I’ll don’t", "' s ' ll", "'\u017f",
    "0", "1", "12", "123", "1234", "12345", "123456", "1234567", "12345678901234567890", "abc123456 7", "v1.2.3-rc4", "3.14159",
    " 2024", "  2024", "1 000 000", "1,000,000.00", "$3.50", "price: $3.50!!\n", "0x1F 1e-5", "½ Ⅷ ٣x", "x² + y³ = ⅔", "٠١٢٣٤٥", "一二三 ④⑤",
    "१२३४", "12時30分", "w048 7tuijk dsdfhu",
    "!", "!!!", "!!!!!!", "...", "…", "?!", "a.b", "a. b", "a ... b", "(x)", " (", "((()))", "foo_bar(x) != y;//z\n", "_x __init__ _", "-- --- - -",
    "a=b a==b a => b -> c", "https://example.org/a?b=c&d=%20#e", "user@example.org", "#include <stdio.h>\n", "int main(void)\n{\n\treturn 0;\n}\n",
    "    if x:\n        y = [1, 2]\n", "\"quoted\" 'single' `back`", "$x ${y} \\n \\\\", "!\n\n!\n", ".\n\n\n.", "+<=>^`|~ $", "a/b\\c|d",
    "Äpfel und Öl", "Straße, naïve, café", "cafe\u0301 na\u0308ive", "A\u030a\u0323 o\u0302\u0301", "\u0301x", "a \u0301", "\u212b \u2126", "ﬁ ﬂ ŉ", "Ⅻ ﹏ ＡＢ１２",
    "İstanbul ıı", "ǅ ǆ ʰ ª º", "Cửa Việt", "нещо на Български", "Привет, мир!", "Ελληνικά; ναι.", "שלום עולם", "مرحبا بالعالم", "هٰذَا", "हिन्दी में", "ไทย ภาษา", "ქართული",
    "日本語 テスト12", "株式会社", "私は、東京に住んでいます。", "我想在apple工作1314151天～", "한국어 텍스트", "\u1112\u1161\u11ab\u1100\u1173\u11af", "ｶﾞ が か\u3099", "𠀀𠮷 𝒳𝟙",
    "😀", "😀!", " 😀", "😀😀", "👍🏽", "👩\u200d🚀", "👨\u200d👩\u200d👧\u200d👦 x", "🇨🇭🇯🇵", "❤\ufe0f ❤", "🏴\U000e0067\U000e0062\U000e007f", "this is 🦙.cpp", "Hello, y'all! How are you 😁 ?",
    "\u00a0x\u3000y", "a\u00a0b", "a\u00a0\u00a0b", "a\u2003b \u2009 c", "a\u200bb", "\ufeffx", "a\u2028b\u2029c", "a\u0085b", "a\u180eb", "a\u00adb", "\u1680 \u205f\u202f",
    "\x00", "a\x00b", "\x01\x02", "\x1b[31mred\x1b[0m", "\x7f", "\x0b\x0c", "a\x1cb\x1f", "\x80\x9f", "\ufffd", "\uffff \ufffe", "\U0010ffff", "\ue000",
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "ababababababab", "                                        x", "\n" * 12, "=" * 33, "aaa" + "\u0301" * 9,
    "HelloWorld ABCdef camelCase XMLHttp", " lighthouse lighthouse", "zebra zebras", " Öl Öl", "😀! 😀!!", "the the the", "an and andand",
    "▁x ▁ a▁b", "▁", "<0x41> <0x0A>", "<unk> <s> </s>", "<|im_end|>", "<|im_start|>user\nhi<|im_end|>\n", "a<think>b</think>", " <think> ", "<think><think>",
    "x <|im_ start|> <|endoftext|", "[INST] <<SYS>>\nx\n<</SYS>>\n\ny [/INST]", "Lets try ö & 株式会社",
]
WITH_CONTROL = {  # texts in which control tokens count
    "bpe": ["<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>", "<|im_end|><|im_end|>", "a<|im_end|>b", "a <|im_end|> b",
            "don<|im_end|>'t", "12<|im_start|>34", "\n<|im_end|>\n\n", "<|im_end", "<think>x<|im_end|>", "<<|im_end|>>", "e<|im_end|>\u0301"],
    "spm": ["</s>", "<s>x</s>", "a</s>b", "a</s> b", "a </s>  b", "</s></s> x", "<s> [INST] x [/INST]", "<unk>x", "x<s", "\n</s>\n"],
}


def random_texts():
    rng = random.Random(14)
    parts = JUNCTIONS + list(" \n\t.,;-+(") + ["a", "B", "the", " and", "\r", "'", "0", "7", "é", "中", "👍", "\u0301", "\u00a0", "\u200d"]
    return ["".join(rng.choice(parts) for _ in range(rng.randint(3, 12))) for _ in range(40)]


def token_line(vocabulary, pre, flags, text, ids):
    return " ".join([vocabulary, pre, flags or "-", text.encode().hex() or ".", *map(str, ids)]) + "\n"


def spm_with_control(sp, text, control):
    """Control tokens cut out, longest first, every piece of text between encoded by itself (with its prefix space)."""
    parts = [text]
    for c in sorted(control, key=len, reverse=True):
        cut = []
        for p in parts:
            if isinstance(p, int):
                cut.append(p)
            else:
                for i, piece in enumerate(p.split(c)):
                    cut += ([control[c]] if i else []) + [piece]
        parts = cut
    return [t for p in parts for t in ([p] if isinstance(p, int) else sp.encode(p) if p else [])]


def golden_llama_cpp(sp):
    """The Llama 2 golden ids of llama.cpp against sentencepiece."""
    folder = ARGS.llamacpp / "models"
    texts = (folder / "ggml-vocab-llama-spm.gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = (folder / "ggml-vocab-llama-spm.gguf.out").read_text().splitlines()
    good = sum(sp.encode(t) == list(map(int, l.split())) for t, l in zip(texts, lines))
    check(good == len(lines), f"llama2: {good} of {len(lines)} golden lines of llama.cpp equal sentencepiece's")


GOLDEN = [  # llama2.c's own test, BOS on; then values from public bug reports
    ("b", "", "1"),
    ("b", "I believe the meaning of life is", "1 306 4658 278 6593 310 2834 338"),
    ("b", "Simply put, the theory of relativity states that ", "1 3439 17632 1925 29892 278 6368 310 14215 537 5922 393 29871"),
    ("b", "A brief message congratulating the team on the launch:\n\n        Hi everyone,\n\n        I just ",
     "1 319 11473 2643 378 629 271 18099 278 3815 373 278 6826 29901 13 13 4706 6324 14332 29892 13 13 4706 306 925 29871"),
    ("b", "Translate English to French:\n\n        sea otter => loutre de mer\n        peppermint => menthe poivrée\n"
     "        plush girafe => girafe peluche\n        cheese =>",
     "1 4103 9632 4223 304 5176 29901 13 13 4706 7205 4932 357 1149 301 449 276 316 2778 13 4706 1236 407 837 524 1149 6042 354 "
     "772 440 29878 1318 13 4706 715 1878 330 3055 1725 1149 330 3055 1725 4639 28754 13 4706 923 968 1149"),
    ("", "Lets try ö & 株式会社", "365 1691 1018 3963 669 29871 31409 30607 30437 30564"),
    ("b", "This is 🦙.cpp", "1 910 338 29871 243 162 169 156 29889 8223"),
    ("b", "    I believe the meaning of life is", "1 268 306 4658 278 6593 310 2834 338"),
]


def make_tokens(_temp):
    import sentencepiece
    from real import PATTERNS, bpe_tokenizer, gguf_fields, spm_from_fields
    tokens, types, merges = train_bpe()
    texts = TEXTS + random_texts()
    assert len(set(texts)) == len(texts)
    lines, different = [], 0
    results = {}
    for pre in PATTERNS:
        tok = bpe_tokenizer(pre, tokens, types, merges)
        for special, batch in ((False, texts), (True, WITH_CONTROL["bpe"])):
            tok.encode_special_tokens = not special
            for text in batch:
                ids = tok.encode(text, add_special_tokens=False).ids
                nfc = pre == "qwen2" and unicodedata.normalize("NFC", text) != text
                results.setdefault(text, {})[pre] = ids
                lines.append(token_line("bpe", pre, "s" * special + "n" * nfc, text, ids))
                if not nfc and not special:
                    back = tok.decode(ids, skip_special_tokens=False)
                    assert back == text, (pre, text, back)
    for text in results:
        different += len(set(map(tuple, results[text].values()))) > 1
    say(f"  bpe: {different} of {len(results)} texts have different ids under different pre-tokenisers")

    def spm_lines(vocabulary, sp, control):
        for text in texts:
            lines.append(token_line(vocabulary, "-", "u" * ("▁" in text), text, sp.encode(text)))
        for text in WITH_CONTROL["spm"] if control else []:
            lines.append(token_line(vocabulary, "-", "s", text, spm_with_control(sp, text, control)))
        for name in ("prose.txt", "mixed.txt"):
            text = (HERE / "texts" / name).read_text(encoding="utf-8")[:600]
            lines.append(token_line(vocabulary, "-", "b", text, [1] + sp.encode(text)))

    old = (HERE / "tokens.txt").read_text().splitlines(True) if (HERE / "tokens.txt").exists() else []
    control = {"<unk>": 0, "<s>": 1, "</s>": 2}
    story = ROOT / "models" / "story.gguf"
    if ARGS.spm or story.exists():
        rebuilt = spm_from_fields(gguf_fields(story)).SerializeToString() if story.exists() else None
        sp = sentencepiece.SentencePieceProcessor(model_proto=ARGS.spm.read_bytes() if ARGS.spm else rebuilt)
        spm_lines("story", sp, control)
        if ARGS.spm and rebuilt:
            other = sentencepiece.SentencePieceProcessor(model_proto=rebuilt)
            check(all(sp.encode(t) == other.encode(t) for t in texts), "story: models/story.gguf holds the vocabulary of --spm")
    else:
        say("  story: no --spm and no models/story.gguf: its lines are kept as they are")
        lines += [l for l in old if l.startswith("story ")]
    if ARGS.llama2c:
        sp = sentencepiece.SentencePieceProcessor(model_file=str(ARGS.llama2c / "tokenizer.model"))
        for flags, text, ids in GOLDEN:
            ids = list(map(int, ids.split()))
            check(([1] if "b" in flags else []) + sp.encode(text) == ids, f"llama2: golden {text[:30]!r}")
            lines.append(token_line("llama2", "-", flags, text, ids))
        spm_lines("llama2", sp, None)  # tokenizer.bin spells its control tokens so that no text is one
        if ARGS.llamacpp:
            golden_llama_cpp(sp)
    else:
        say("  llama2: no --llama2c: its lines are kept as they are")
        lines += [l for l in old if l.startswith("llama2 ")]
    write_text("tokens.txt", "".join(lines))


# ------------------------------------------------------------------------------------------------
# llama2.c's own text

PROMPTS = ["", "Once upon a time", "One day, a little girl named Lily", "Tom had a red ball.", "The dog said", "It was a cold, dark night and",
           "\"Can I play with you?\" asked", "Lily and Ben went to the park. They saw a big", "   The old man", "In the forest there lived a fox"]


def make_parity(temp):
    if not ARGS.llama2c or not ARGS.story.exists():
        return say(f"  skipped: needs --llama2c and {ARGS.story}")
    config, tensors = read_bin(ARGS.story)
    write_bin_v0(temp / "story.v0.bin", config, tensors)
    tokenizer = ARGS.story.with_suffix(".tokenizer.bin")
    compilers = {"plain": ["-O3"], "other order": ["-O3", "-ffast-math", "-mavx2", "-mfma"]}
    for name, flags in compilers.items():
        subprocess.run(["cc", *flags, "-o", str(temp / name), str(ARGS.llama2c / "run.c"), "-lm"], check=True)
    rng = np.random.default_rng(15)
    nudged = []
    for i in range(6):  # a text that changes when the weights move by a few parts in 10^6 sits on a tie, and is no test;
        size = 3e-6 if i < 3 else 3e-4  # one that stays when they move by 10^-4 must come out of story.bin itself
        moved = {k: (w * (1 + size * rng.standard_normal(w.shape))).astype(np.float32) for k, w in tensors.items()}
        write_bin_v0(temp / f"nudged{i}.bin", config, moved)
        nudged.append(temp / f"nudged{i}.bin")

    def run(program, model, options, prompt):
        words = [str(program), str(model), "-z", str(tokenizer)]
        for letter, value in zip("tpsn", options):
            words += ["-" + letter, value]
        words += ["-i", prompt] if prompt else []
        return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout

    lines, dropped = [], []
    for i, prompt in enumerate(PROMPTS):
        for options in (("0", "0.9", "1", ("64", "256", "0")[i % 3]), ("1.0", "0.9", str(42 + i), ("256", "100", "48")[i % 3]),
                        ("0.8", "1.0", str(1337 * (i + 1)), ("120", "256", "200")[i % 3])):
            out = run(temp / "plain", temp / "story.v0.bin", options, prompt)
            others = [run(temp / "other order", temp / "story.v0.bin", options, prompt)]
            others += [run(temp / "plain", m, options, prompt) for m in nudged[:3]]
            if all(o == out for o in others):
                sturdy = all(run(temp / "plain", m, options, prompt) == out for m in nudged[3:])
                lines.append(" ".join(["any" if sturdy else "f32", *options, prompt.encode().hex() or ".", out.hex()]) + "\n")
            else:
                dropped.append((options, prompt))
    say(f"  {len(lines)} runs kept, {len(dropped)} dropped that sit on a tie")
    write_text("parity.txt", "".join(lines))


def make_real(_temp):
    from real import write_reference
    for name in ("smollm2", "gemma3", "coder05"):
        path = ROOT / "models" / "real" / (name + ".gguf")
        if path.exists():
            write_text(name + ".ref.txt", write_reference(path))
        else:
            say(f"  {name}: skipped: needs models/real/{name}.gguf (sh models/fetch.sh {name})")


PARTS = dict(models=make_models, families=make_families, split=make_split, quants=make_quants, kquant=make_kquant,
             bins=make_bins, blocks=make_blocks, bpe=make_bpe, tokens=make_tokens, parity=make_parity, real=make_real)


def main():
    global ARGS
    p = argparse.ArgumentParser(description="Make the fixtures of this folder.")
    p.add_argument("parts", nargs="*", metavar="PART", help=" ".join(PARTS))
    p.add_argument("--check", action="store_true", help="check what is there instead of writing it")
    p.add_argument("--llama2c", type=pathlib.Path, help="source folder of karpathy/llama2.c")
    p.add_argument("--llamacpp", type=pathlib.Path, help="source folder of llama.cpp")
    p.add_argument("--story", type=pathlib.Path, default=ROOT / "models" / "story.bin", help="story.bin, its tokenizer beside it")
    p.add_argument("--spm", type=pathlib.Path, help="tokenizer.model of the story model")
    ARGS = p.parse_args()
    unknown = set(ARGS.parts) - set(PARTS)
    if unknown:
        p.error(f"unknown part {', '.join(sorted(unknown))}; there are: {' '.join(PARTS)}")
    import importlib.metadata as meta
    for name, version in PINNED.items():
        found = meta.version(name).split("+")[0]
        if found != version:
            say(f"make.py: {name} {found} found, pinned is {version}: fixtures may come out different")
    sys.path.insert(0, str(HERE))
    for name in ARGS.parts or PARTS:
        say(name)
        with tempfile.TemporaryDirectory() as temp:
            PARTS[name](pathlib.Path(temp))
    if problems:
        sys.exit(f"make.py: {len(problems)} wrong")


if __name__ == "__main__":
    main()
