"""Tiny random checkpoints of every model family, and what transformers says about them.

Used by make.py, part `families`. A row of FAMILIES is one checkpoint, so small that a mechanism which goes wrong
shows at once: windows of a few positions, scaling ranges of a few dozen, norm weights, sinks and biases moved away
from their initial values. Matrices hold numbers that are halves already, so that an f16 file is exact and half
the size. The longest runs cross windows, scaling ranges and the borders of prefill chunks (512 rows).
"""
import functools, json
import numpy as np
import gguf
from gguf.quants import dequantize


def torch_one_thread():
    import torch
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    return torch


def family(kind, seed, n, rows, layers=2, dim=32, heads=4, kv=2, head=8, hidden=40, vocab=48, embed=1.0, theta=10000.0,
           rope=None, **more):
    """kind: transformers' model type; embed: spread of the embeddings; rope: scaling beside theta; more: the rest
    of the configuration."""
    config = dict(vocab_size=vocab, hidden_size=dim, num_attention_heads=heads, num_key_value_heads=kv,
                  intermediate_size=hidden, num_hidden_layers=layers, max_position_embeddings=256, head_dim=head,
                  rms_norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=None,
                  rope_parameters={"rope_type": "default", "rope_theta": theta, **(rope or {})})
    return kind, seed, n, rows, embed, {**config, **more}


ROWS = [0, 1, 31, 63]
LATE = [0, 1, 63, 64, 511, 512, 1023, 1024, 1229]
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
MOE = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16)
LONGROPE = dict(heads=2, kv=1, head=None, sliding_window=None, original_max_position_embeddings=64, rope=dict(
    rope_type="longrope", partial_rotary_factor=0.75, original_max_position_embeddings=64,
    short_factor=[1.0, 1.05, 1.2, 1.5, 1.9, 2.3], long_factor=[1.0, 1.3, 2.1, 3.7, 5.5, 8.0]))
GEMMA = dict(heads=2, kv=1, head=24, embed=0.2, tie_word_embeddings=True, rms_norm_eps=1e-6)
SLIDE, FULL = "sliding_attention", "full_attention"

FAMILIES = {
    "qwen2": family("qwen2", 101, 64, ROWS, embed=0.4, theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=True),
    "qwen2-window": family("qwen2", 102, 64, ROWS, layers=3, use_sliding_window=True, sliding_window=8,
                           max_window_layers=1),
    "qwen3": family("qwen3", 103, 64, ROWS, head=12, theta=1e6, rms_norm_eps=3e-2),
    "qwen3-yarn": family("qwen3", 104, 1230, LATE, heads=2, kv=1, head=32, vocab=32, max_position_embeddings=2048,
                         rope=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=64,
                                   attention_factor=1.1, beta_fast=8.0, beta_slow=2.0)),
    "qwen3moe": family("qwen3_moe", 105, 64, ROWS, norm_topk_prob=True, **MOE),
    "qwen3moe-raw": family("qwen3_moe", 106, 64, ROWS, norm_topk_prob=False, **MOE),
    "qwen2moe": family("qwen2_moe", 107, 64, ROWS, norm_topk_prob=False, shared_expert_intermediate_size=40, **MOE),
    "mixtral": family("mixtral", 108, 64, ROWS, hidden=24, num_local_experts=4, num_experts_per_tok=2,
                      sliding_window=None),
    "mistral": family("mistral", 109, 1230, LATE, kv=1, vocab=32, sliding_window=200, max_position_embeddings=2048),
    "gemma": family("gemma", 110, 64, ROWS, **GEMMA),
    "gemma2": family("gemma2", 111, 64, ROWS, layers=4, sliding_window=8, attn_logit_softcapping=2.0,
                     final_logit_softcapping=3.0, query_pre_attn_scalar=10, **GEMMA),
    "gemma3": family("gemma3_text", 112, 96, [0, 1, 48, 95], layers=6, sliding_window=8, query_pre_attn_scalar=24,
                     layer_types=5 * [SLIDE] + [FULL], **{**GEMMA, "hidden": 32, "rope_parameters": {
                         SLIDE: dict(rope_type="default", rope_theta=10000.0),
                         FULL: dict(rope_type="linear", rope_theta=1e6, factor=8.0)}}),
    "phi3": family("phi3", 113, 64, ROWS, head=None, sliding_window=8),
    "phi3-short": family("phi3", 114, 64, ROWS, **LONGROPE),
    "phi3-long": family("phi3", 114, 160, [0, 63, 64, 159], **LONGROPE),  # the same weights
    "olmo2": family("olmo2", 115, 64, ROWS, head=None, theta=500000.0),
    "olmo3": family("olmo3", 116, 160, [0, 31, 32, 159], layers=4, heads=2, kv=1, head=None, sliding_window=8,
                    layer_types=3 * [SLIDE] + [FULL], rope_parameters={
                        SLIDE: dict(rope_type="default", rope_theta=10000.0),
                        FULL: dict(rope_theta=10000.0, attention_factor=1.2, **YARN)}),
    "granite": family("granite", 117, 64, ROWS, embed=0.3, head=None, embedding_multiplier=6.0, residual_multiplier=0.4,
                      attention_multiplier=0.2, logits_scaling=1.5, tie_word_embeddings=True),
    "granitemoe": family("granitemoe", 118, 64, ROWS, embed=0.3, head=None, hidden=24, num_local_experts=4,
                         num_experts_per_tok=2, embedding_multiplier=6.0, residual_multiplier=0.4,
                         attention_multiplier=0.2, logits_scaling=0.5),
    "granitemoe-shared": family("granitemoeshared", 123, 64, ROWS, embed=0.3, head=None, hidden=24, num_local_experts=4,
                                num_experts_per_tok=2, shared_intermediate_size=16, residual_multiplier=0.4),
    "smollm3": family("smollm3", 119, 64, ROWS, layers=4, embed=0.4, head=None, theta=2e6, tie_word_embeddings=True),
    "mistral3": family("ministral3", 120, 160, [0, 63, 64, 159], heads=2, kv=1, head=32, rope=dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0,
        beta_fast=4.0, beta_slow=0.25, llama_4_scaling_beta=0.2)),
    "gpt-oss": family("gpt_oss", 121, 1230, LATE, heads=2, kv=1, head=32, hidden=32, vocab=32, theta=150000.0,
                      sliding_window=128, layer_types=[SLIDE, FULL], num_local_experts=4, num_experts_per_tok=2,
                      rope=dict(rope_type="yarn", factor=32.0, original_max_position_embeddings=64, beta_fast=32.0,
                                beta_slow=1.0, truncate=False), max_position_embeddings=2048),
    "gpt-oss-mxfp4": family("gpt_oss", 122, 64, ROWS, hidden=32, head=16, theta=150000.0, sliding_window=8,
                            layer_types=[SLIDE, FULL], num_local_experts=4, num_experts_per_tok=2,
                            rope=dict(truncate=False, **YARN)),
}
# saved with the configuration as transformers 4 wrote it, which is how most were published
OLD_SPELLING = {"qwen2", "qwen3-yarn", "mistral", "phi3-long", "granite", "gpt-oss"}


# ------------------------------------------------------------------------------------------------
# The checkpoint

MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4_codes(w):
    """Blocks of 32 along the last axis: the nearest of eight magnitudes, and the block's power of two."""
    blocks = np.abs(w.reshape(-1, 32))
    exponent = np.ceil(np.log2(blocks.max(1, keepdims=True) / 6))
    return np.abs(blocks[..., None] / 2.0 ** exponent[..., None] - MXFP4).argmin(-1), exponent


def mxfp4_round(w):
    levels, exponent = mxfp4_codes(w)
    return np.sign(w) * (MXFP4[levels] * 2.0 ** exponent).reshape(w.shape)


def weights(name, kind, embed, shape, rng, mxfp4):
    """Random weights of unit gain: attention mixes, logits spread over a few nats."""
    if "norm" in name:  # gemma's files hold w where the others hold 1 + w
        return rng.uniform(-0.4, 0.4, shape) + (not kind.startswith("gemma"))
    if name.endswith("sinks"):
        return rng.normal(1.5, 1.5, shape)
    if name.endswith("bias"):
        return rng.normal(0, 0.3, shape)
    if "embed_tokens" in name:
        return rng.normal(0, embed, shape).astype(np.float16)
    transposed = kind == "gpt_oss" and ".experts." in name  # [expert][in][out]
    gain = 1.5 if any(part in name for part in ("q_proj", "qkv_proj", "lm_head")) else 1.0
    if "router" in name or name.endswith("gate.weight"):
        gain = 2.0
    if transposed:  # beyond the clamp at 7 now and then, and back
        gain = 3.0 if "gate_up" in name else 0.3
    w = rng.normal(0, gain / np.sqrt(shape[-2 if transposed else -1]), shape)
    if mxfp4 and transposed:
        w = mxfp4_round(w.swapaxes(1, 2)).swapaxes(1, 2)
    return w.astype(np.float16)


def random_model(name):
    torch = torch_one_thread()
    import transformers
    transformers.utils.logging.disable_progress_bar()
    kind, seed, _, _, embed, config = FAMILIES[name]
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "head_dim" or v})
    config._attn_implementation, config.dtype = "eager", torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for p_name, p in sorted(model.named_parameters()):
            w = weights(p_name, kind, embed, p.shape, rng, "mxfp4" in name)
            p.copy_(torch.tensor(w.astype(np.float32)))
    return model


def tiny_bpe(folder, size):
    """A byte-level BPE tokenizer.json with exactly `size` entries: a few letters, the rest merges."""
    from tokenizers import Tokenizer, AddedToken, models, pre_tokenizers, decoders
    letters = [c for c in "Ġetaoinshrdlucmfwypvbgk.,'"][:min(26, size - 3)]
    vocabulary = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>"] + letters)}
    merges = []
    pairs = [("Ġ", "t"), ("h", "e"), ("Ġ", "a"), ("i", "n"), ("Ġt", "he"), ("a", "n"), ("e", "r"), ("Ġ", "s"),
             ("o", "n"), ("r", "e"), ("Ġ", "w"), ("n", "d"), ("a", "t"), ("o", "u"), ("Ġa", "nd"), ("i", "s"),
             ("i", "t"), ("e", "d"), ("in", "g"), ("Ġ", "b"), ("Ġ", "f"), ("e", "n"), ("o", "r"), ("Ġ", "c"),
             ("e", "s"), ("Ġt", "o"), ("a", "s"), ("l", "l"), ("Ġ", "m"), ("Ġ", "d"), ("o", "f"), ("Ġ", "h"),
             ("l", "e"), ("Ġ", "p"), ("a", "r"), ("Ġw", "as"), ("i", "c"), ("s", "t")]
    for left, right in pairs:
        if len(vocabulary) == size:
            break
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
    assert len(vocabulary) == size, (len(vocabulary), size)
    tok = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    assert tok.get_vocab_size() == size
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}')


def mxfp4_pack(folder):
    """Expert matrices as the published gpt-oss checkpoints hold them: rows of 4-bit numbers, two neighbours in a byte,
    the first in the low half, and a power of two for each 32."""
    from safetensors.numpy import load_file, save_file
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj")) and ".experts." in n]:
        w = tensors.pop(name).swapaxes(1, 2)  # [expert][out][in]
        levels, exponent = mxfp4_codes(w)
        code = levels | (w < 0).reshape(levels.shape) << 3
        tensors[name + "_blocks"] = (code[:, 0::2] | code[:, 1::2] << 4).astype(np.uint8).reshape(*w.shape[:2], -1, 16)
        tensors[name + "_scales"] = (exponent + 127).astype(np.uint8).reshape(*w.shape[:2], -1)
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def save_checkpoint(model, folder, tokenizer=tiny_bpe, old_spelling=False, mxfp4=False):
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer(folder, model.config.vocab_size)
    if mxfp4:
        mxfp4_pack(folder)
    if old_spelling:  # config.json as transformers 4 wrote it
        path = folder / "config.json"
        config = json.loads(path.read_text())
        rope = config.pop("rope_parameters")
        for key in rope.keys() & {"rope_theta", "partial_rotary_factor"}:
            config[key] = rope.pop(key)
        kind = rope.pop("rope_type")
        config["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
        path.write_text(json.dumps(config, indent=1))
    return folder


def some_ids(seed, n, vocabulary):
    """Random ids with repeated stretches, so that attention has something to find."""
    rng = np.random.default_rng(seed + 1000)
    ids = [1]
    while len(ids) < n:
        if len(ids) > 8 and rng.random() < 0.25:
            start = int(rng.integers(0, len(ids) - 4))
            ids += ids[start:start + int(rng.integers(2, 6))]
        else:
            ids.append(int(rng.integers(0, vocabulary)))
    return ids[:n]


# ------------------------------------------------------------------------------------------------
# The reference run

def exact_angles(model):
    """transformers rounds position * frequency to float32, an error that grows with the position (1e-5 at 255, 1e-4
    at 4,096 in cos and sin). Here its own formulas run in double and only cos and sin are rounded."""
    torch = torch_one_thread()
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def tables(module, x, position_ids, layer_type=None):
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        formula = module.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
        more = dict(layer_type=layer_type) if layer_type else {}
        if kind == "longrope":
            more["seq_len"] = int(position_ids.max()) + 1
        single = torch.float32
        torch.float = torch.float32 = torch.float64
        try:
            inv_freq, scale = formula(module.config, **more)
        finally:
            torch.float = torch.float32 = single
        assert inv_freq.dtype == torch.float64
        angles = position_ids[..., None].double() * inv_freq
        if model.config.model_type != "gpt_oss":
            angles = torch.cat((angles, angles), -1)
        return (angles.cos() * scale).to(x.dtype), (angles.sin() * scale).to(x.dtype)

    found = [m for m in model.modules() if hasattr(m, "rope_type")]
    assert found
    for module in found:
        module.forward = functools.partial(tables, module)


def run_reference(model, ids):
    """Logits [N][V] and the residual stream behind every layer [L][N][E], float32."""
    torch = torch_one_thread()
    kept = []
    hooks = [layer.register_forward_hook(
        lambda _m, _i, out: kept.append((out[0] if isinstance(out, tuple) else out)[0].clone()))
        for layer in model.model.layers]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.float().numpy(), np.stack([k.float().numpy() for k in kept])


def write_ref(path, ids, logits, hidden, rows):
    n, v = logits.shape
    with open(path, "wb") as f:
        f.write(f"runc-ref {n} {v} {hidden.shape[2]} {len(hidden)} {len(rows)}\n".encode())
        f.write((" ".join(map(str, ids)) + "\n").encode())
        f.write((" ".join(map(str, rows)) + "\n").encode())
        f.write(np.ascontiguousarray(logits, "<f4").tobytes())
        f.write(np.ascontiguousarray(hidden[:, rows], "<f4").tobytes())


def read_ref(path):
    raw = path.read_bytes()
    head, ids, rows, rest = raw.split(b"\n", 3)
    n, v, e, l, r = map(int, head.split()[1:])
    numbers = np.frombuffer(rest, "<f4")
    assert head.startswith(b"runc-ref ") and len(numbers) == n * v + l * r * e, path
    return (list(map(int, ids.split())), list(map(int, rows.split())),
            numbers[:n * v].reshape(n, v), numbers[n * v:].reshape(l, r, e))


# ------------------------------------------------------------------------------------------------
# The independent pass: float64, straight from the keys and tensors of the file

def gguf_weights(path):
    """Fields and float32 tensors ([out][in]) of a GGUF."""
    reader = gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items()}
    tensors = {}
    for t in reader.tensors:
        dims = [int(d) for d in t.shape][::-1]
        tensors[t.name] = np.asarray(dequantize(np.array(t.data), t.tensor_type), np.float32).reshape(dims)
    return fields, tensors



ADJACENT = {"llama", "mistral3", "granite", "granitemoe", "smollm3"}  # rotary pairs (2i, 2i+1), else (i, i + n/2)
PERIOD = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "gpt-oss": 2}  # every so many layers, the last sees everything


def frequencies(arch, get, tensors, n, slides):
    """Angle per position of each rotary pair, and the factor on cos and sin."""
    d = get("rope.dimension_count", get("attention.key_length"))
    pairs = np.arange(d // 2)
    base = get("rope.freq_base", 10000.0)
    if slides and arch == "gemma3":
        base = get("rope.freq_base_swa", 10000.0)
    inv = float(base) ** (-2 * pairs / d)
    if slides and arch in ("gemma3", "olmo2"):
        return inv, 1.0
    kind, factor, m = get("rope.scaling.type"), get("rope.scaling.factor", 1.0), get("rope.scaling.attn_factor", 1.0)
    old = get("rope.scaling.original_context_length", get("context_length"))
    if "rope_freqs.weight" in tensors:
        inv = inv / tensors["rope_freqs.weight"]
    elif "rope_factors_long.weight" in tensors:
        inv = inv / tensors[f"rope_factors_{'long' if n > old else 'short'}.weight"]
    elif kind == "linear":
        inv = inv / factor
    elif kind == "yarn":
        turns = lambda r: d * np.log(old / (2 * np.pi * r)) / (2 * np.log(base))
        low, high = turns(get("rope.scaling.yarn_beta_fast", 32.0)), turns(get("rope.scaling.yarn_beta_slow", 1.0))
        if arch != "gpt-oss":
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        ramp = np.clip((pairs - low) / max(0.001, high - low), 0, 1)
        inv = inv * (1 - ramp) + inv / factor * ramp
        usual = 0.1 * np.log(factor) + 1
        if arch == "mistral3":
            usual /= 0.1 * get("rope.scaling.yarn_log_multiplier", 0.0) * np.log(factor) + 1
        m *= get("rope.scaling.yarn_attn_factor", usual)
    return inv, m


def turn(v, inv, m, adjacent):
    """Rotary embedding of v [n][heads][d]."""
    angle = np.arange(len(v))[:, None, None] * inv
    cos, sin, pairs, out = np.cos(angle) * m, np.sin(angle) * m, len(inv), v.copy()
    first, second = (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)) if adjacent else (
        slice(0, pairs), slice(pairs, 2 * pairs))
    a, b = v[..., first], v[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out


def gated(arch, gate, up):
    if arch == "gpt-oss":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7) + 1
        return gate / (1 + np.exp(-1.702 * gate)) * up
    if arch.startswith("gemma"):
        return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate ** 3))) * up
    return gate / (1 + np.exp(-gate)) * up


def experts(arch, get, part, tensor, h):
    """Routed experts, all of them computed for every row and most weighted 0."""
    score = part("ffn_gate_inp", h)
    p = np.exp(score - score.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    chosen = np.zeros_like(p)
    best = np.argsort(-score, 1, kind="stable")[:, :get("expert_used_count")]
    np.put_along_axis(chosen, best, np.take_along_axis(p, best, 1), 1)
    if get("expert_weights_norm", arch != "qwen2moe"):
        chosen /= chosen.sum(1, keepdims=True)
    out = 0
    for e in range(get("expert_count")):
        one = lambda name, v: v @ tensor(name + ".weight")[e].T + (
            tensor(name + ".bias")[e] if tensor(name + ".bias") is not None else 0)
        out = out + chosen[:, e:e + 1] * one("ffn_down_exps", gated(
            arch, one("ffn_gate_exps", h), one("ffn_up_exps", h)))
    if tensor("ffn_gate_shexp.weight") is not None:
        shared = part("ffn_down_shexp", gated(arch, part("ffn_gate_shexp", h), part("ffn_up_shexp", h)))
        gate = tensor("ffn_gate_inp_shexp.weight")
        out = out + (shared if gate is None else shared / (1 + np.exp(-(h @ gate.reshape(-1, 1)))))
    return out


def attention(q, k, v, scale, cap, window, sinks):
    """q [n][heads][d], k and v [n][kv heads][d]"""
    n, heads, _ = q.shape
    gap = np.arange(n)[:, None] - np.arange(n)
    out = np.empty_like(q)
    for i in range(heads):
        j = i // (heads // k.shape[1])
        s = q[:, i] @ k[:, j].T * scale
        s = cap * np.tanh(s / cap) if cap else s
        s[(gap < 0) | (gap >= window if window else False)] = -np.inf
        top = np.maximum(s.max(1), -np.inf if sinks is None else sinks[i])[:, None]
        p = np.exp(s - top)
        out[:, i] = p @ v[:, j] / (p.sum(1, keepdims=True) + (0 if sinks is None else np.exp(sinks[i] - top)))
    return out


def forward64(fields, tensors, ids):
    """Logits [N][V] and the residual stream behind each layer [L][N][E] of what a GGUF holds."""
    arch = fields["general.architecture"]
    heads = fields[f"{arch}.attention.head_count"]
    extra = {"attention.head_count_kv": heads, "attention.key_length": fields[f"{arch}.embedding_length"] // heads}
    get = lambda key, default=None: fields.get(f"{arch}.{key}", extra.get(key, default))
    n, kv, d, eps = len(ids), *map(get, ("attention.head_count_kv", "attention.key_length",
                                         "attention.layer_norm_rms_epsilon"))
    norm = lambda v, w: v if w is None else v / np.sqrt((v * v).mean(-1, keepdims=True) + eps) * w
    window, pattern = get("attention.sliding_window", 0), get("attention.sliding_window_pattern", PERIOD.get(arch))
    x = tensors["token_embd.weight"].astype(np.float64)[ids] * get("embedding_scale", 1.0)
    if arch.startswith("gemma"):
        x = x * np.sqrt(x.shape[1])
    kept = []
    for layer in range(get("block_count")):
        slides = window and (pattern is None or (
            pattern[layer] if isinstance(pattern, list) else layer % pattern < pattern - 1))
        tensor = lambda name: tensors.get(f"blk.{layer}.{name}")
        part = lambda name, v: v @ tensor(name + ".weight").astype(np.float64).T + (
            tensor(name + ".bias") if tensor(name + ".bias") is not None else 0)

        h = norm(x, tensor("attn_norm.weight"))
        if tensor("attn_qkv.weight") is not None:
            q, k, v = np.split(part("attn_qkv", h), [heads * d, (heads + kv) * d], 1)
        else:
            q, k, v = part("attn_q", h), part("attn_k", h), part("attn_v", h)
        for_norm = lambda v, name: v.reshape(n, -1, d if tensor(name) is None else len(tensor(name)))
        q = norm(for_norm(q, "attn_q_norm.weight"), tensor("attn_q_norm.weight")).reshape(n, heads, d)
        k = norm(for_norm(k, "attn_k_norm.weight"), tensor("attn_k_norm.weight")).reshape(n, kv, d)
        if arch != "smollm3" or layer % 4 != 3:
            inv, m = frequencies(arch, get, tensors, n, slides)
            q, k = turn(q, inv, m, arch in ADJACENT), turn(k, inv, m, arch in ADJACENT)
        if get("attention.temperature_scale"):
            old = get("rope.scaling.original_context_length")
            q = q * (1 + get("attention.temperature_scale") * np.log(1 + np.arange(n) // old))[:, None, None]
        out = attention(q, k, v.reshape(n, kv, d), get("attention.scale", d ** -0.5), get("attn_logit_softcapping"),
                        window if slides else 0, tensor("attn_sinks.weight"))
        after, before = tensor("post_attention_norm.weight"), tensor("ffn_norm.weight")
        if arch == "gpt-oss":
            after, before = None, after
        x = x + norm(part("attn_output", out.reshape(n, heads * d)), after) * get("residual_scale", 1.0)

        h = norm(x, before)
        if get("expert_count"):
            out = experts(arch, get, part, tensor, h)
        elif tensor("ffn_gate.weight") is None:
            out = part("ffn_down", gated(arch, *np.split(part("ffn_up", h), 2, 1)))
        else:
            out = part("ffn_down", gated(arch, part("ffn_gate", h), part("ffn_up", h)))
        x = x + norm(out, tensor("post_ffw_norm.weight")) * get("residual_scale", 1.0)
        kept.append(x)
    head = tensors.get("output.weight", tensors["token_embd.weight"]).astype(np.float64)
    logits = norm(x, tensors["output_norm.weight"]) @ head.T / get("logit_scale", 1.0)
    cap = get("final_logit_softcapping")
    return cap * np.tanh(logits / cap) if cap else logits, np.stack(kept)
