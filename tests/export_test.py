#!/usr/bin/env python3
"""export.py's round trips: a small random Llama in Hugging Face form goes through every kind of output, and
./run must give the same logits from all of them. Needs numpy, safetensors, gguf; run by tests/export.sh."""
import json, pathlib, subprocess, sys, tempfile
import numpy as np
from safetensors.numpy import save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUN = str(ROOT / "run")
DIM, HIDDEN, LAYERS, HEADS, KV, CONTEXT = 64, 96, 2, 4, 2, 64
WORDS = ["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", "abc"]
VOCAB = 259 + len(WORDS)
IDS = "1 " + " ".join(str(3 + i * 37 % 260) for i in range(40))


def checkpoint(folder, tied, shards):
    rng = np.random.default_rng(11)
    kv = DIM * KV // HEADS
    matrix = lambda rows, cols: (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)
    norm = lambda: (1 + 0.3 * rng.standard_normal(DIM)).astype(np.float32)
    t = {"model.embed_tokens.weight": matrix(VOCAB, DIM) * 8, "model.norm.weight": norm()}
    if not tied:
        t["lm_head.weight"] = matrix(VOCAB, DIM)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        t |= {p + "input_layernorm.weight": norm(), p + "post_attention_layernorm.weight": norm(),
              p + "self_attn.q_proj.weight": matrix(DIM, DIM), p + "self_attn.k_proj.weight": matrix(kv, DIM),
              p + "self_attn.v_proj.weight": matrix(kv, DIM), p + "self_attn.o_proj.weight": matrix(DIM, DIM),
              p + "mlp.gate_proj.weight": matrix(HIDDEN, DIM), p + "mlp.up_proj.weight": matrix(HIDDEN, DIM),
              p + "mlp.down_proj.weight": matrix(DIM, HIDDEN)}
    names = sorted(t)
    if shards == 1:
        save_file(t, folder / "model.safetensors")
    else:
        index = {}
        for s in range(shards):
            part, file = names[s::shards], f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
            save_file({n: t[n] for n in part}, folder / file)
            index |= {n: file for n in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": tied,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", "hidden_act": "silu"}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}))
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    vocab |= {w: 259 + i for i, w in enumerate(WORDS)}
    added = [{"id": i, "content": c, "special": True, "lstrip": False, "rstrip": False, "single_word": False,
              "normalized": False} for i, c in enumerate(["<unk>", "<s>", "</s>"])]
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": added, "pre_tokenizer": None,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [], "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": None, "model": {"type": "BPE", "vocab": vocab, "byte_fallback": True, "unk_token": "<unk>",
                                   "merges": ["a b", "\u2581 a", "\u2581a b", "ab c"]}}))


def export(out, *options):
    done = subprocess.run([sys.executable, str(ROOT / "export.py"), str(out), *options], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"export.py {out.name}: {done.stderr}")


def logits(model):
    file = model.with_suffix(".logits")
    subprocess.run([RUN, str(model), "-m", "score", "--ids", "-i", IDS, "--kv", "f32", "--logits", str(file)],
                   check=True, capture_output=True)
    return np.fromfile(file, np.float32).reshape(-1, VOCAB)


def tokens(model, text):
    return subprocess.run([RUN, str(model), "-m", "tokenize", "-i", text], check=True, capture_output=True, text=True).stdout.strip()


def main():
    passed = failed = 0
    for tied, shards in (True, 1), (False, 3):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            checkpoint(folder, tied, shards)
            export(folder / "f32.gguf", "--hf", name, "--type", "f32")
            truth = logits(folder / "f32.gguf")
            # how far each kind may be, in standard deviations of the logits: nothing for floats, else the rounding
            # of the weights (half of 2^-11, 2^-8, 1/127 or 1/8 of a value, grown through two layers)
            kinds = [("v0.bin", ["--version", "0"], 0), ("v1.bin", ["--version", "1"], 0),
                     ("v2.bin", ["--version", "2"], 0.15), ("f16.gguf", ["--type", "f16"], 0.01),
                     ("bf16.gguf", ["--type", "bf16"], 0.05), ("q8_0.gguf", ["--type", "q8_0"], 0.15),
                     ("q4_0.gguf", ["--type", "q4_0"], 1.5)]
            for kind, options, limit in kinds:
                export(folder / kind, "--hf", name, *options)
                off = float(np.abs(logits(folder / kind) - truth).max() / truth.std())
                same = tokens(folder / kind, "ab abc \u00e9") == tokens(folder / "f32.gguf", "ab abc \u00e9")
                ok = off <= limit and same
                passed, failed = passed + ok, failed + (not ok)
                print(f"{'ok    ' if ok else 'FAILED'} tied {tied}, {shards} files, {kind}: logits off by {off:.1e}, ids {'equal' if same else 'DIFFER'}")
            export(folder / "vocab.gguf", "--hf", name, "--vocab-only")
            export(folder / "tok.bin", "--tokenizer", str(folder / "vocab.gguf"))
            ok = (folder / "tok.bin").read_bytes() == (folder / "v0.tokenizer.bin").read_bytes()
            passed, failed = passed + ok, failed + (not ok)
            print(f"{'ok    ' if ok else 'FAILED'} tokenizer.bin from the checkpoint and from its GGUF vocabulary")
    print(f"{passed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
