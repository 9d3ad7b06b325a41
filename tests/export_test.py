#!/usr/bin/env python3
"""export.py's round trips: a small random Llama in Hugging Face form goes through every kind of output, and
./run must give the same logits from all of them. A small random checkpoint of each other family must give the
tensors that llama.cpp's converter makes of it (their digest stands here) and the keys beside it, and run.
Needs numpy, safetensors, gguf; run by tests/export.sh."""
import hashlib, json, pathlib, subprocess, sys, tempfile
from types import SimpleNamespace
import numpy as np
from safetensors.numpy import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import export as exporter
RUN = str(ROOT / "run")
DIM, HIDDEN, LAYERS, HEADS, KV, CONTEXT = 64, 96, 2, 4, 2, 64
WORDS = ["\u2581", "a", "b", "c", "ab", "\u2581a", "\u2581ab", "abc"]
VOCAB = 259 + len(WORDS)
IDS = "1 " + " ".join(str(3 + i * 37 % 260) for i in range(40))


def checkpoint(folder, tied, shards, hidden=HIDDEN):
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
              p + "mlp.gate_proj.weight": matrix(hidden, DIM), p + "mlp.up_proj.weight": matrix(hidden, DIM),
              p + "mlp.down_proj.weight": matrix(DIM, hidden)}
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
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": hidden,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV, "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": tied,
        "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32", "hidden_act": "silu"}))
    tokenizer(folder)


def tokenizer(folder):
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
    if exporter.main([str(out), *map(str, options), "--quiet"]):
        sys.exit(f"export.py {out.name} failed")


def logits(model):
    file = model.with_suffix(".logits")
    subprocess.run([RUN, str(model), "-m", "score", "--ids", "-i", IDS, "--kv", "f32", "--logits", str(file)],
                   check=True, capture_output=True)
    return np.fromfile(file, np.float32).reshape(-1, VOCAB)


def tokens(model, text):
    return subprocess.run([RUN, str(model), "-m", "tokenize", "-i", text], check=True, capture_output=True, text=True).stdout.strip()


# What each family's layers hold: Hugging Face names, with dimensions of SIZES.
SIZES = {"E": 32, "F": 64, "Q": 64, "K": 32, "D": 16, "H": 4, "N": 4, "X": 32, "S": 64, "1": 1,
         "QKV": 128, "2F": 128, "2X": 64}
NORMS = "input_layernorm E, post_attention_layernorm E, "
POST = "post_attention_layernorm E, post_feedforward_layernorm E, "
ATT = "self_attn.q_proj Q E, self_attn.k_proj K E, self_attn.v_proj K E, self_attn.o_proj E Q, "
BIAS = "self_attn.q_proj.bias Q, self_attn.k_proj.bias K, self_attn.v_proj.bias K, "
HEAD_NORMS, WIDE = ("self_attn.q_norm D, self_attn.k_norm D, ", "self_attn.q_norm Q, self_attn.k_norm K, ")
MLP = "mlp.gate_proj F E, mlp.up_proj F E, mlp.down_proj E F, "
MOE = "mlp.gate N E, " + "".join(
    f"mlp.experts.{e}.gate_proj X E, mlp.experts.{e}.up_proj X E, mlp.experts.{e}.down_proj E X, " for e in range(4))
MIXTRAL = MOE.replace("mlp", "block_sparse_moe").replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")
GRANITE = "block_sparse_moe.router.layer N E, block_sparse_moe.input_linear N 2X E, block_sparse_moe.output_linear N E X, "
GPT_OSS = ("self_attn.o_proj.bias E, self_attn.sinks. H, mlp.router N E, mlp.router.bias N, "
           "mlp.experts.gate_up_proj_bias. N 2X, mlp.experts.down_proj_bias. N E, ")
FLOATS = "mlp.experts.gate_up_proj. N E 2X, mlp.experts.down_proj. N X E, "
NIBBLES = ("mlp.experts.gate_up_proj_blocks. N 2X 1 D, mlp.experts.gate_up_proj_scales. N 2X 1, "
           "mlp.experts.down_proj_blocks. N E 1 D, mlp.experts.down_proj_scales. N E 1, ")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
        "short_factor": [1 + i / 8 for i in range(6)], "long_factor": [2 + i for i in range(6)]}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# name: class, model_type, layer, settings, keys of the GGUF, digest of the converter's tensors (f16)
FAMILIES = {
    "llama3": ("LlamaForCausalLM", "llama", NORMS + ATT + MLP, {"rope_parameters": LLAMA3},
               {"rope.freq_base": 5e5, "rope.scaling.type": None}, "777f8f8e56add87b"),
    "mistral": ("MistralForCausalLM", "mistral", NORMS + ATT + MLP, {"sliding_window": 8},
                {"attention.sliding_window": 8, "attention.sliding_window_pattern": None}, "e795f567fe9653d8"),
    "mixtral": ("MixtralForCausalLM", "mixtral", NORMS + ATT + MIXTRAL, {**EXPERTS, "intermediate_size": 32},
                {"expert_count": 4, "expert_used_count": 2, "attention.sliding_window": None}, "fbc0f4455fe1a47c"),
    "ministral3": ("Ministral3ForCausalLM", "ministral3", NORMS + ATT + MLP, {"rope_parameters": {
        **YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
        {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1, "rope.scaling.type": "yarn"}, "9fb117e4dd397a71"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", NORMS + ATT + BIAS + MLP, {
        "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [False, True]}, "8a8fa6c1fedb7ba1"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe", NORMS + ATT + BIAS + MOE + MLP.replace("mlp.", "mlp.shared_expert.").replace(
        "F", "S") + "mlp.shared_expert_gate 1 E, ", {**EXPERTS, "norm_topk_prob": True, "shared_expert_intermediate_size": 64},
        {"expert_weights_norm": True, "expert_shared_feed_forward_length": 64, "expert_feed_forward_length": 32}, "0a487649e1b6c98d"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", NORMS + ATT + HEAD_NORMS + MLP, {"rope_parameters": {
        **YARN, "attention_factor": 1.25, "beta_fast": 8.0}}, {"rope.scaling.yarn_attn_factor": 1.25,
        "rope.scaling.yarn_beta_fast": 8.0, "rope.scaling.original_context_length": 64, "attention.sliding_window": None}, "b8b27ee77c36e7fa"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", NORMS + ATT + HEAD_NORMS + MOE, {**EXPERTS, "norm_topk_prob": True},
                 {"expert_weights_norm": None, "expert_feed_forward_length": 32}, "8d55a16b8fe7d681"),
    "gemma": ("GemmaForCausalLM", "gemma", NORMS + ATT + MLP, {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
              {"attention.key_length": 16, "attention.scale": None}, "a0c25bfb99fc36da"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", NORMS + "pre_feedforward_layernorm E, post_feedforward_layernorm E, " + ATT + MLP, {
        "tie_word_embeddings": True, "hidden_act": None, "sliding_window": 8, "query_pre_attn_scalar": 64},
        {"attention.scale": 0.125, "attn_logit_softcapping": 50.0, "attention.sliding_window_pattern": None}, "62fd2e806e940890"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", NORMS + "pre_feedforward_layernorm E, post_feedforward_layernorm E, " + ATT
               + HEAD_NORMS + MLP, {"tie_word_embeddings": True, "hidden_act": None, "sliding_window": 8, "query_pre_attn_scalar": 16,
               "layer_types": ["full_attention", "sliding_attention"], "rope_parameters": {
                   "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                   "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}},
               {"rope.freq_base": 1e6, "rope.freq_base_swa": 2e4, "rope.scaling.factor": 8.0, "attention.scale": None,
                "attention.sliding_window_pattern": [False, True]}, "6839f851740da8b7"),
    "phi3": ("Phi3ForCausalLM", "phi3", NORMS + "self_attn.qkv_proj QKV E, self_attn.o_proj E Q, mlp.gate_up_proj 2F E, mlp.down_proj E F, ",
             {"hidden_size": 64, "rope_parameters": LONG, "original_max_position_embeddings": 64},
             {"rope.dimension_count": 12, "rope.scaling.attn_factor": 1.154700, "attention.sliding_window": 0}, "a4d37cb739279e3e"),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", POST + ATT + WIDE + MLP, {}, {"attention.sliding_window": None}, "6d420adbe0eb7d8d"),
    "olmo3": ("Olmo3ForCausalLM", "olmo3", POST + ATT + WIDE + MLP, {"sliding_window": 8},
              {"rope.freq_base": 5e5, "attention.sliding_window": 8, "attention.sliding_window_pattern": [True, True]}, "6d420adbe0eb7d8d"),
    "granite": ("GraniteForCausalLM", "granite", NORMS + ATT + MLP, {
        "embedding_multiplier": 12, "logits_scaling": 8, "residual_multiplier": 0.25, "attention_multiplier": 0.0625},
        {"embedding_scale": 12.0, "logit_scale": 8.0, "residual_scale": 0.25, "attention.scale": 0.0625}, "e795f567fe9653d8"),
    "granitemoe": ("GraniteMoeForCausalLM", "granitemoe", NORMS + ATT + GRANITE, {**EXPERTS, "intermediate_size": 32},
                   {"attention.scale": 1.0, "feed_forward_length": 32}, "7175aae88deec944"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", NORMS + ATT + MLP, {}, {"rope.freq_base": 2e6}, "e795f567fe9653d8"),
    "gptoss": ("GptOssForCausalLM", "gpt_oss", NORMS + ATT + BIAS + GPT_OSS + FLOATS, {
        **EXPERTS, "intermediate_size": 32, "sliding_window": 8, "rope_parameters": {**YARN, "truncate": False}},
        {"attention.sliding_window": 8, "expert_feed_forward_length": 32, "rope.scaling.factor": 4.0}, "f0315881a92ce444"),
    "gptoss4": ("GptOssForCausalLM", "gpt_oss", NORMS + ATT + BIAS + GPT_OSS + NIBBLES, {
        **EXPERTS, "intermediate_size": 32, "sliding_window": 8, "rope_parameters": {**YARN, "truncate": False},
        "quantization_config": {"quant_method": "mxfp4"}, "layer_types": ["full_attention"] * 2},
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": [False, False]}, "7c6473115575f65b"),
}


def family(folder, name):
    """Write a checkpoint of a family; returns its tensors and config."""
    hf_class, kind, layer, settings, _, _ = FAMILIES[name]
    rng, sizes = np.random.default_rng(len(name)), {**SIZES, "E": settings.get("hidden_size", 32)}

    def tensor(full, dims):
        if full.endswith("blocks"):
            return rng.integers(0, 256, dims, dtype=np.uint8)
        if full.endswith("scales"):
            return rng.integers(120, 125, dims, dtype=np.uint8)
        x = rng.standard_normal(dims) / (1 if len(dims) == 1 else np.sqrt(dims[-1]))
        return (x + ("norm" in full and "gemma" not in name) * 3).astype(np.float32 if "gemma" in name else np.float16)

    config = {
        "architectures": [hf_class], "model_type": kind, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float16", "bos_token_id": 1,
        "eos_token_id": [2, 5], **settings}
    rows = f"embed_tokens V E, norm E, lm_head{'?' * config['tie_word_embeddings']} V E, "
    rows += "".join(f"layers.{i}.{row}, " for i in range(2) for row in layer.split(", ") if row)
    t = {}
    for row in filter(None, rows.split(", ")):
        full, *dims = row.split()
        full = full.rstrip(".") if full.endswith((".", ".bias")) else full + ".weight"
        if "?" not in full:
            t["model." * (full != "lm_head.weight") + full] = tensor(full, [sizes.get(d, VOCAB) for d in dims])
    save_file(t, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return t, config


def read(path):
    """Keys and tensors of a GGUF, and a digest of the tensors but for the rotation's divisors."""
    from gguf import GGUFReader
    reader, digest = GGUFReader(path), hashlib.sha256()
    for t in sorted(reader.tensors, key=lambda t: t.name):
        if not t.name.startswith("rope_"):
            digest.update(f"{t.name} {t.shape.tolist()} {t.tensor_type.name} ".encode() + t.data.tobytes())
    return ({k: f.contents() for k, f in reader.fields.items()}, {t.name: t for t in reader.tensors}, digest.hexdigest()[:16])


def same(found, wanted):
    return found == wanted or isinstance(wanted, float) and found is not None and abs(found / wanted - 1) < 1e-4


def old_spelling(config):
    """The same settings as before transformers 5."""
    c = {k: v for k, v in config.items() if k != "rope_parameters"}
    rope = config.get("rope_parameters", {})
    if "full_attention" in rope:
        c["rope_local_base_freq"], rope = rope["sliding_attention"]["rope_theta"], rope["full_attention"]
    c |= {k: v for k, v in rope.items() if k in ("rope_theta", "partial_rotary_factor")}
    scaling = {k: v for k, v in rope.items() if k not in c}
    return {**c, "rope_scaling": {**scaling, "type": scaling.pop("rope_type").replace("longrope", "su")} if scaling else None}


def families(check):
    for name, (_, _, _, _, keys, digest) in FAMILIES.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            t, config = family(folder, name)
            export(folder / "a.gguf", "--hf", folder, "--type", "f16", "--name", "x")
            fields, tensors, found = read(folder / "a.gguf")
            arch = fields["general.architecture"]
            wrong = [f"{k} {fields.get(f'{arch}.{k}')}" for k, v in keys.items() if not same(fields.get(f"{arch}.{k}"), v)]
            if found != digest:
                wrong.append("tensors differ: " + found)
            if name == "llama3":    # llama.cpp's divisors for Llama 3.1, of every 8th pair of its head
                got = tensors["rope_freqs.weight"].data.tolist()
                if not all(map(same, got, [1.0, 1.0, 1.0, 1.0, 2.694530, 8.0, 8.0, 8.0])):
                    wrong.append(f"rope_freqs {got}")
            (folder / "config.json").write_text(json.dumps(old_spelling(config)))
            export(folder / "old.gguf", "--hf", folder, "--type", "f16", "--name", "x")
            if (folder / "a.gguf").read_bytes() != (folder / "old.gguf").read_bytes():
                wrong.append("the older spelling of config.json gives another file")
            ran = subprocess.run([RUN, folder / "a.gguf", "-m", "score", "--ids", "-i", IDS, "--logits", folder / "logits"],
                                 capture_output=True, text=True)
            if "weight type 39, which is not known" in ran.stderr:
                print("skip: ./run does not know MXFP4")
            elif ran.returncode or ran.stderr.count("warning") or not np.isfinite(np.fromfile(folder / "logits", np.float32)).all():
                wrong.append(f"./run: {ran.stderr.strip()}")
            check(not wrong, f"{name}: {', '.join(wrong) or f'{len(tensors)} tensors, {len(keys)} keys'}")
            if name == "gptoss4":   # decoded, each value is a sign and one of eight numbers, times 2^(e - 127)
                export(folder / "f32.gguf", "--hf", folder, "--type", "f32")
                b, e = (t[f"model.layers.1.mlp.experts.gate_up_proj_{k}"] for k in ("blocks", "scales"))
                values = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6], np.float32)
                plain = values[np.stack([b % 16, b // 16], -1)].reshape(4, 64, 32) * np.exp2(e.astype(np.float32) - 127)
                up = read(folder / "f32.gguf")[1]["blk.1.ffn_up_exps.weight"].data
                check(np.array_equal(up, plain[:, 1::2]), "gptoss4: as floats, every second row is the up projection's")


def refusals(check):
    for name, edit, words in (
            ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"), ("gptoss", {"swiglu_limit": 5.0}, "swiglu_limit"),
            ("mistral", {"architectures": ["FooForCausalLM"]}, "FooForCausalLM is not supported, known are LlamaForCausalLM"),
            ("qwen3moe", {"mlp_only_layers": [1]}, "mlp_only_layers"), ("mixtral", {"num_local_experts": 5}, "missing"),
            ("qwen3", {"rope_parameters": {**YARN, "truncate": False}}, "truncate"), ("qwen2", {"hidden_act": "gelu"}, "gelu"),
            ("granite", {"rope_parameters": LONG}, "longrope"), ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "chunked"),
            ("qwen2", {"quantization_config": {"quant_method": "bitnet"}}, "bitnet"),
            ("qwen2", {"quantization_config": {"quant_method": "awq", "version": "gemv"}}, "awq gemv"),
            ("qwen2", {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}}, "marlin-24"),
            ("granite", {"logits_scaling": [1]}, "logits_scaling"), ("granite", {"embedding_multiplier": 0}, "embedding_multiplier"),
            ("granite", {"residual_multiplier": 1e30}, "residual_multiplier"), ("granite", {"attention_multiplier": float("nan")}, "attention_mul"),
            ("gemma2", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar"), ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
            ("gemma2", {"final_logit_softcapping": 1e300}, "final_logit_softcapping"), ("qwen3moe", {"norm_topk_prob": 1e30}, "norm_topk_prob"),
            ("qwen2", {"rope_parameters": []}, "rope_parameters"), ("qwen2", {"hidden_act": ["silu"]}, "hidden_act"),
            ("llama3", {"rope_parameters": {**LLAMA3, "factor": 1e300}}, "rope_freqs")):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            _, config = family(folder, name)
            (folder / "config.json").write_text(json.dumps({**config, **edit}))
            done = subprocess.run([sys.executable, str(ROOT / "export.py"), folder / "a.gguf", "--hf", folder],
                                  stderr=subprocess.PIPE, text=True)
            ok = done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1 and not (folder / "a.gguf").exists()
            check(ok, f"{name} refused: {done.stderr.strip()[:100]}")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        checkpoint(folder, True, 1)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "architectures": "LlamaForCausalLM"}))
        (folder / "v.gguf.part").write_text("mine")
        export(folder / "v.gguf", "--hf", folder, "--vocab-only")
        export(folder / "v.gguf", "--hf", folder)
        before = sorted(f.name for f in folder.iterdir())
        check((folder / "v.gguf.part").read_text() == "mine" and len(before) == 6, "another's .part is kept, architectures as a string")
        (folder / "link.gguf").symlink_to("v.gguf")
        (folder / "weights.bin").symlink_to("model.safetensors")
        for out, options, generation, words in (
                ("v.gguf", ["--tokenizer", folder / "v.gguf", "--vocab-only"], {}, "is an input"),
                ("link.gguf", ["--tokenizer", folder / "v.gguf", "--vocab-only"], {}, "is an input"),
                ("weights.bin", ["--hf", folder], {}, "is an input"),
                ("a.gguf", ["--hf", folder], {"top_k": 1e30}, "top_k"), ("a.gguf", ["--hf", folder], {"temperature": 1e300}, "temperature")):
            (folder / "generation_config.json").write_text(json.dumps(generation))
            done = subprocess.run([sys.executable, str(ROOT / "export.py"), folder / out, *options], stderr=subprocess.PIPE, text=True)
            check(done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1 and not (folder / "a.gguf").exists(),
                  f"refused: {done.stderr.strip()[-100:]}")


def save(path, tensors):
    """A safetensors file; a pair is the name of a type that numpy does not know and its bytes."""
    header, data = {}, b""
    for name, x in tensors.items():
        kind, x = x if isinstance(x, tuple) else ({"<f4": "F32", "<f2": "F16", "<i4": "I32", "|i1": "I8"}[x.dtype.str], x)
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def words(fields, bits, less=0):
    """Rows of small integers in words of 32 bits, first ones lowest; each word is less by a number, as one integer."""
    n = 32 // bits
    pack = lambda part: (sum(int(v) << bits * k for k, v in enumerate(part)) - less) % 2**32
    return np.array([[pack(row[i:i + n]) for i in range(0, len(row), n)] for row in fields], np.uint32).view(np.int32)


def gptq(rng, rows, cols, bits, size, version, sym=False, order=False):
    """What GPTQ stores for a random matrix [rows, cols], and the matrix."""
    top, groups = 2**bits, -(-cols // size)
    q, z = rng.integers(0, top, (rows, cols)), rng.integers(0, top, (rows, groups))
    z = np.full_like(z, top // 2) if sym else z
    s = rng.uniform(0.01, 0.02, (rows, groups)).astype(np.float16)
    group = np.array([c // size for c in range(cols)], np.int32)
    if order:
        group = rng.permutation(group)
    less = 0 if version == "gptq_v2" else sum(1 << i for i in range(0, 32, bits))
    parts = {"qweight": np.ascontiguousarray(words(q, bits).T),
             "qzeros": words(z.T, bits, less), "scales": np.ascontiguousarray(s.T)}
    if order:
        parts["g_idx"] = group
    w = np.array([[np.float32(s[r, group[c]]) * np.float32(q[r, c] - z[r, group[c]]) for c in range(cols)] for r in range(rows)])
    return parts, w


def awq(rng, rows, cols, size):
    """AWQ: words along the outputs, of each eight first the even ones, then the odd."""
    mixed = lambda x: [[row[8 * (i // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[i % 8]] for i in range(len(row))] for row in x]
    q, z = rng.integers(0, 16, (cols, rows)), rng.integers(0, 16, (cols // size, rows))
    s = rng.uniform(0.01, 0.02, (cols // size, rows)).astype(np.float16)
    w = [[np.float32(s[c // size, r]) * np.float32(q[c, r] - z[c // size, r]) for c in range(cols)] for r in range(rows)]
    return {"qweight": words(mixed(q), 4), "qzeros": words(mixed(z), 4), "scales": s}, np.array(w)


def pack_quantized(rng, rows, cols, size, zero):
    """compressed-tensors: words along the inputs, zeros along the outputs."""
    q, z = rng.integers(0, 16, (rows, cols)), rng.integers(0, 16, (rows, cols // size)) if zero else np.full((rows, cols // size), 8)
    s = rng.uniform(0.01, 0.02, z.shape).astype(np.float16)
    w = [[np.float32(s[r, c // size]) * np.float32(q[r, c] - z[r, c // size]) for c in range(cols)] for r in range(rows)]
    parts = {"weight_packed": words(q, 4), "weight_scale": s, "weight_shape": np.array([rows, cols], np.int32)}
    return {**parts, **({"weight_zero_point": np.ascontiguousarray(words(z.T, 4).T)} if zero else {})}, np.array(w)


def e4m3(b):
    exponent, fraction = b // 8 % 16, b % 8
    value = (1 + fraction / 8) * 2.0**(exponent - 7) if exponent else fraction / 8 * 2.0**-6
    return -value if b > 127 else value


def fp8(rng, rows, cols, block, suffix, power=False):
    """Bytes of 8 bits; one scale each block (0: of the whole length), a float or a power of 2 in a byte."""
    high, wide = (n or whole for n, whole in zip(block, (rows, cols)))
    b = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    b[b % 128 == 127] = 0
    shape = -(-rows // high), -(-cols // wide)
    s = rng.integers(118, 122, shape, dtype=np.uint8) if power else rng.uniform(1e-3, 2e-3, shape).astype(np.float32)
    scale = lambda r, c: np.float32(2.0**(int(s[r, c]) - 127) if power else s[r, c])
    w = np.array([[np.float32(e4m3(int(b[r, c]))) * scale(r // high, c // wide) for c in range(cols)] for r in range(rows)])
    return {"weight": ("F8_E4M3", b), suffix: ("F8_E8M0", s) if power else s, "input_scale": np.ones(1, np.float32)}, w


def int8(rng, rows, cols):
    q, s = rng.integers(-128, 128, (rows, cols), dtype=np.int8), rng.uniform(1e-3, 2e-3, (rows, 1)).astype(np.float32)
    return {"weight": q, "weight_scale": s}, q * s


def compressed(form, **weights):
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


def quantised(check):
    """A checkpoint whose matrices are quantised gives the GGUF of the one that holds their values as floats."""
    g = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    f8 = {"quant_method": "fp8", "weight_block_size": [32, 48]}
    for what, config, make in (
            ("GPTQ, symmetric", {**g, "sym": True}, lambda *x: gptq(*x, 4, 32, "gptq", True)),
            ("GPTQ, act order", {**g, "desc_act": True}, lambda *x: gptq(*x, 4, 32, "gptq", False, True)),
            ("GPTQ v2, 8 bits, rows of one group", {**g, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
             lambda *x: gptq(*x, 8, 999, "gptq_v2")),
            ("GPTQ, 8 bits, last group short", {**g, "bits": 8, "group_size": 40}, lambda *x: gptq(*x, 8, 40, "gptq")),
            ("GPTQ, 2 bits", {**g, "bits": 2, "checkpoint_format": "gptq_v2"}, lambda *x: gptq(*x, 2, 32, "gptq_v2")),
            ("AWQ", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM"}, lambda *x: awq(*x, 32)),
            ("FP8 in blocks", f8, lambda *x: fp8(*x, (32, 48), "weight_scale_inv")),
            ("FP8 in blocks, scales of 8 bits", f8, lambda *x: fp8(*x, (32, 48), "weight_scale_inv", True)),
            ("FP8, a scale each row", compressed("float-quantized", num_bits=8, strategy="channel"),
             lambda *x: fp8(*x, (1, 0), "weight_scale")),
            ("FP8, one scale", compressed("float-quantized", num_bits=8), lambda *x: fp8(*x, (0, 0), "weight_scale")),
            ("int8, a scale each row", compressed("int-quantized", num_bits=8), int8),
            ("pack-quantized", compressed("pack-quantized", num_bits=4, group_size=32), lambda *x: pack_quantized(*x, 32, False)),
            ("pack-quantized with zeros", compressed("pack-quantized", num_bits=4, group_size=32),
             lambda *x: pack_quantized(*x, 32, True))):
        with tempfile.TemporaryDirectory() as folder:
            folder, rng = pathlib.Path(folder), np.random.default_rng(5)
            checkpoint(folder, True, 1)
            plain, packed = load_file(folder / "model.safetensors"), {}
            for name, x in list(plain.items()):
                if "_proj" not in name:
                    packed[name] = x
                    continue
                parts, w = make(rng, *x.shape)
                plain[name] = w.astype(np.float32)
                packed |= {name.removesuffix("weight") + part: v for part, v in parts.items()}
                packed[name.replace("weight", "bias")] = np.zeros(x.shape[0], np.float16)
            save(folder / "model.safetensors", plain)
            export(folder / "plain.gguf", "--hf", folder, "--type", "f32", "--name", "x")
            save(folder / "model.safetensors", packed)
            settings = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**settings, "quantization_config": config}))
            export(folder / "packed.gguf", "--hf", folder, "--type", "f32", "--name", "x")
            same = (folder / "plain.gguf").read_bytes() == (folder / "packed.gguf").read_bytes()
            check(same and np.isfinite(logits(folder / "packed.gguf")).all(), f"{what}: the values of its definition")


def adapter(folder, name, modules, config=None, **tensors):
    """A peft adapter for modules {name: (rank, inputs, outputs)}; returns its tensors."""
    rng, t = np.random.default_rng(3), {}
    for module, (rank, n_in, n_out) in modules.items():
        t[f"base_model.model.{module}.lora_A.weight"] = rng.standard_normal((rank, n_in)).astype(np.float32) / 8
        t[f"base_model.model.{module}.lora_B.weight"] = rng.standard_normal((n_out, rank)).astype(np.float32) / 8
    (folder / name).mkdir(exist_ok=True)
    save(folder / name / "adapter_model.safetensors", {**t, **tensors})
    (folder / name / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 6, **(config or {})}))
    return t


def adapters(check):
    """A merged adapter: W + scale * B A for the matrices it names, rows of queries and keys in GGUF's order."""
    q, k, down = (f"model.layers.{i}.{m}_proj" for i, m in ((0, "self_attn.q"), (1, "self_attn.k"), (1, "mlp.down")))
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        checkpoint(folder, True, 1)
        export(folder / "base.gguf", "--hf", folder, "--type", "f32")
        base = read(folder / "base.gguf")[1]
        lead = {"r": 8, "rank_pattern": {"q_proj": 4, "^model.layers.1.*down_proj": 2}, "alpha_pattern": {"layers.1.self_attn.k_proj": 3}}
        for what, config, scales in (("alpha / r", {}, (6 / 4, 3 / 8, 6 / 2)), (
                "alpha / sqrt(r)", {"use_rslora": True, "fan_in_fan_out": True}, (6 / 2, 3 / 8**0.5, 6 / 2**0.5))):
            t = adapter(folder, "lora", {q: (4, DIM, DIM), k: (8, DIM, DIM // 2), down: (2, HIDDEN, DIM)}, {**lead, **config})
            export(folder / "merged.gguf", "--hf", folder, "--type", "f32", "--lora", folder / "lora")
            wrong, merged = [], read(folder / "merged.gguf")[1]
            wanted = {n: x.data.astype(np.float64) for n, x in base.items()}
            for (name, module, heads), scale in zip((("blk.0.attn_q", q, HEADS), ("blk.1.attn_k", k, KV), ("blk.1.ffn_down", down, 0)), scales):
                a, b = (t[f"base_model.model.{module}.lora_{half}.weight"].astype(np.float64) for half in "AB")
                size = DIM // HEADS     # in each head row 2i is row i, row 2i + 1 is row i + size / 2
                order = [h * size + i // 2 + i % 2 * size // 2 for h in range(heads) for i in range(size)] or range(len(b))
                wanted[name + ".weight"] += scale * b[list(order)] @ a
            wrong = [n for n in wanted if np.abs(merged[n].data - wanted[n]).max() > 1e-6]
            moved = np.abs(logits(folder / "merged.gguf") - logits(folder / "base.gguf")).max()
            check(not wrong and moved > 0.1 and len(merged) == len(base), f"adapter, {what}: {exporter.listing(wrong) or 'as defined'}")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        family(folder, "phi3")
        export(folder / "base.gguf", "--hf", folder, "--type", "f32")
        module = "model.layers.1.self_attn.qkv_proj"
        t = adapter(folder, "lora", {module: (4, 64, 128)})
        export(folder / "merged.gguf", "--hf", folder, "--type", "f32", "--lora", folder / "lora")
        a, b = (t[f"base_model.model.{module}.lora_{half}.weight"].astype(np.float64) for half in "AB")
        base, merged = (read(folder / n)[1]["blk.1.attn_qkv.weight"].data for n in ("base.gguf", "merged.gguf"))
        check(np.abs(merged - base - 1.5 * b @ a).max() < 1e-6, "adapter of a fused module")
    refused_adapters(check)


def refused_adapters(check):
    q, one = "model.layers.0.self_attn.q_proj", np.ones((4, 64), np.float32)
    good = {q: (4, DIM, DIM)}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        checkpoint(folder, True, 1)
        for modules, config, tensors, words in (
                (good, {"use_dora": True}, {}, "use_dora"), (good, {"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
                (good, {"bias": "all"}, {}, "bias is all"), (good, {"peft_type": "IA3"}, {}, "IA3"),
                (good, {"init_lora_weights": "pissa"}, {}, "pissa"), (good, {"r": 8}, {}, "expected [8, 64]"),
                (good, {"rank_pattern": {"(": 2}}, {}, "unexpected content"), (good, {"lora_alpha": "x"}, {}, "unexpected content"),
                (good, {}, {f"base_model.model.{q}.lora_magnitude_vector": one}, "lora_magnitude_vector cannot"),
                (good, {}, {"base_model.model.model.embed_tokens.lora_embedding_A": one}, "embed_tokens.lora_embedding_A cannot"),
                (good, {}, {"base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight": one}, "lora_B of model.layers.1.self_attn.v"),
                ({"lm_head": (4, DIM, VOCAB)}, {}, {}, "called lm_head"), ({"model.layers.0.mlp.fc1": (4, 8, 8)}, {}, {}, "mlp.fc1"),
                ({q: (4, DIM, 32)}, {}, {}, "lora_B"), ({}, {}, {}, "no adapter")):
            adapter(folder, "lora", modules, config, **tensors)
            done = subprocess.run([sys.executable, str(ROOT / "export.py"), folder / "a.gguf", "--hf", folder, "--lora", folder / "lora"],
                                  stderr=subprocess.PIPE, text=True)
            check(done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1,
                  f"adapter refused: {done.stderr.strip()[-90:]}")


def k_blocks(check):
    """Q4_K and Q6_K: as near as plain rounding in groups of their size with exact scales, which the format has not."""
    from gguf import GGMLQuantizationType as types, quants
    rng = np.random.default_rng(9)
    flat = np.repeat(np.array([[0.0], [3.0], [-3.0], [1e5], [-1e-3]], np.float32), 512, 1)
    for what, x in (("normal", rng.standard_normal((64, 512))), ("long tails", rng.standard_t(3, (64, 512))), ("flat", flat),
                    ("off centre", rng.standard_normal((64, 512)) - 4), ("positive", np.abs(rng.standard_normal((64, 512))))):
        for kind, group in (types.Q4_K, 32), (types.Q6_K, 16):
            x = x.astype(np.float32)
            off = quants.dequantize(exporter.encode(x, kind, what), kind) - x
            g = x.reshape(-1, group)
            low = np.minimum(g.min(1, keepdims=True), 0) if kind is types.Q4_K else 0
            step = np.maximum((g.max(1, keepdims=True) - low) / 15 if kind is types.Q4_K else np.abs(g).max(1, keepdims=True) / 31, 1e-30)
            naive = np.rint((g - low) / step) * step + low - g
            error, limit = np.sqrt((off**2).mean()), 1.02 * np.sqrt((naive**2).mean()) + 1e-3 * np.abs(x).max() * (what == "flat")
            check(error <= limit, f"{kind.name}, {what}: error {error:.2e}, at most {limit:.2e}")
    shape, p = exporter.Tensor((256, 256), {}, None), SimpleNamespace(n_layers=8, tied=False)
    more = [i for i in range(8) if exporter.storage_type(f"blk.{i}.attn_v.weight", shape, "q4_K", p) is types.Q6_K]
    rest = [exporter.storage_type(n + ".weight", shape, "q4_K", p).name for n in ("blk.0.attn_q", "token_embd", "output")]
    check(more == [0, 3, 6, 7] and rest == ["Q4_K", "Q4_K", "Q6_K"], f"q4_K's mix: values in Q6_K in layers {more}, {rest}")
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        checkpoint(folder, False, 1, 256)
        export(folder / "f32.gguf", "--hf", folder, "--type", "f32")
        truth = logits(folder / "f32.gguf")
        for kind, down in ("q4_K", ["Q4_K", "Q6_K"]), ("q6_K", ["Q6_K", "Q6_K"]):
            export(folder / "k.gguf", "--hf", folder, "--type", kind)
            found = read(folder / "k.gguf")[1]
            off = float(np.abs(logits(folder / "k.gguf") - truth).max() / truth.std())
            got = [found[f"blk.{i}.ffn_down.weight"].tensor_type.name for i in range(2)]
            rest = found["blk.0.attn_q.weight"].tensor_type.name
            check(off < 1 and got == down and rest == "Q8_0", f"{kind}: {got}, rows of 64 {rest}, logits off by {off:.1e}")


def vocabularies(check):
    """tokenizer.json as families have it: the splitting rule by its expression, types of added tokens, ends of text."""
    l3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    byte = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    split = lambda rule: [{"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}, byte]
    digits = [{"type": "Digits", "individual_digits": True}, {**byte, "use_regex": True}]
    bytes_ = {f"<0x{b:02X}>": 10 + b for b in range(256)}
    for name, before, model, wanted in (
            ("Llama 3", split(l3), {"ignore_merges": True}, {"model": "gpt2", "pre": "llama-bpe"}),
            ("OLMo 2", split(l3), {}, {"model": "gpt2", "pre": "dbrx", "add_bos_token": False}),
            ("Qwen 2", split(l3.replace("{1,3}", "")), {}, {"pre": "qwen2", "add_space_prefix": False}),
            ("Granite", digits, {}, {"pre": "smollm"}),
            ("Gemma", [], {"byte_fallback": True, "vocab": bytes_}, {"model": "llama", "add_space_prefix": False}),
            ("another rule", split("a+"), {}, None)):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            added = [{"id": 2, "content": "<|end|>", "special": True}, {"id": 3, "content": "<think>", "special": False},
                     {"id": 4, "content": "<|user|>", "special": False}]
            (folder / "tokenizer.json").write_text(json.dumps({
                "added_tokens": added, "normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
                "model": {"type": "BPE", "merges": ["a b"], **model, "vocab": {"a": 0, "b": 1, "ab": 5, **model.get("vocab", {})}}}))
            (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1], "temperature": 0.6, "top_k": 20}))
            (folder / "chat_template.jinja").write_text("{{ x }}")
            done = subprocess.run([sys.executable, str(ROOT / "export.py"), folder / "a.gguf", "--hf", folder, "--vocab-only"],
                                  stderr=subprocess.PIPE, text=True)
            if wanted is None:
                check(done.returncode == 1 and "--pre" in done.stderr, f"tokenizer with {name}: {done.stderr.strip()[-60:]}")
                continue
            fields = read(folder / "a.gguf")[0]
            got = {k: fields.get("tokenizer.ggml." + k) for k in wanted}
            rest = [fields["tokenizer.ggml.token_type"][:6], fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.eot_token_id"],
                    fields["general.sampling.top_k"], fields["tokenizer.chat_template"]]
            check(got == wanted and rest == [[1, 1, 3, 4, 3, 1], 1, 2, 20, "{{ x }}"], f"tokenizer of {name}: {got} {rest}")


def main():
    passed = failed = 0

    def check(ok, what):
        nonlocal passed, failed
        passed, failed = passed + bool(ok), failed + (not ok)
        print(f"{'ok    ' if ok else 'FAILED'} {what}")

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
                equal = tokens(folder / kind, "ab abc \u00e9") == tokens(folder / "f32.gguf", "ab abc \u00e9")
                check(off <= limit and equal, f"tied {tied}, {shards} files, {kind}: logits off by {off:.1e}, ids "
                      + ("equal" if equal else "DIFFER"))
            export(folder / "vocab.gguf", "--hf", name, "--vocab-only")
            export(folder / "tok.bin", "--tokenizer", str(folder / "vocab.gguf"))
            check((folder / "tok.bin").read_bytes() == (folder / "v0.tokenizer.bin").read_bytes(),
                  "tokenizer.bin from the checkpoint and from its GGUF vocabulary")
    families(check)
    refusals(check)
    quantised(check)
    adapters(check)
    k_blocks(check)
    vocabularies(check)
    print(f"{passed} passed, {failed} failed")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
