#!/usr/bin/env python3
"""Compare run.c with the reference on real weights.

    python tests/real.py MODEL.gguf [--run ./run] [--peer DIR] [--long FILE] [--threads N]

The reference is transformers, float32, on the very weights of the file (from_pretrained with gguf_file);
its tokenizer is the tokenizers library on the vocabulary and merges of the file. --peer names a folder
with llama.cpp's llama-completion and llama-perplexity, whose KL (over the second half of a text), greedy
text and perplexity stand beside.
--long adds the perplexity of the first 20,000 tokens of FILE in pieces of 512 (--tokens, -c change that).
Exit status 1 if a promise is broken: ids equal, KL below 1e-4 everywhere, greedy text equal up to a near tie.
"""
import argparse, math, os, pathlib, subprocess, sys, tempfile, time, warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
HERE = pathlib.Path(__file__).resolve().parent
TEXTS = ["prose.txt", "code.txt", "mixed.txt"]
PROMPTS = ["The capital of France is", "Once upon a time, in a small village by the sea,",
           "def fibonacci(n):\n", "The three primary colours are", "Q: What is 7 times 8?\nA:"]

# Splitting patterns by tokenizer.ggml.pre (facts about each published tokenizer.json)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PATTERNS = {  # pre: (patterns one after the other, ignore merges, NFC)
    "gpt-2": ([GPT2], False, False),
    "smollm": ([r"\p{N}", GPT2], False, False),
    "llama-bpe": ([WORD + r"\p{N}{1,3}|" + TAIL], True, False),
    "qwen2": ([WORD + r"\p{N}|" + TAIL], False, True),
}


def say(text):
    print(text, file=sys.stderr, flush=True)


def bpe_tokenizer(pre, tokens, types, merges):
    """A byte-level BPE of the tokenizers library from what a GGUF holds (types: 3 control, 4 user-defined)."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    patterns, ignore_merges, nfc = PATTERNS[pre]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    pairs = [tuple(m.split(" ", 1)) for m in merges]
    tok = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    if nfc:
        tok.normalizer = normalizers.NFC()
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, types) if k == 3])
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in zip(tokens, types) if k == 4])
    assert tok.get_vocab_size() == len(tokens)
    tok.encode_special_tokens = True  # control tokens written in a text are ordinary text
    return tok


class FileTokenizer:
    """encode(text) -> ids with BOS where the file asks for it; decode(ids)."""
    def __init__(self, fields):
        get = lambda key, default=None: fields.get("tokenizer.ggml." + key, default)
        kind, tokens = get("model"), get("tokens")
        if kind == "gpt2":
            tok = bpe_tokenizer(get("pre"), tokens, get("token_type"), get("merges"))
            self.plain = lambda text: tok.encode(text, add_special_tokens=False).ids
            self.decode = lambda ids: tok.decode(ids, skip_special_tokens=True)
            bos = get("add_bos_token", get("pre") == "llama-bpe")
        elif kind == "llama":
            import sentencepiece
            sp = sentencepiece.SentencePieceProcessor(model_proto=spm_from_fields(fields).SerializeToString())
            self.plain, self.decode = sp.encode, sp.decode
            bos = get("add_bos_token", True)
        else:
            sys.exit(f"tokenizer model {kind}: not known to this script")
        self.bos = [get("bos_token_id")] if bos else []

    def encode(self, text):
        return self.bos + self.plain(text)


def spm_from_fields(fields):
    """A SentencePiece BPE model rebuilt from tokens, scores and types of a GGUF."""
    from sentencepiece import sentencepiece_model_pb2 as pb
    get = lambda key: fields["tokenizer.ggml." + key]
    model = pb.ModelProto()
    model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
    model.trainer_spec.vocab_size = len(get("tokens"))
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    model.normalizer_spec.remove_extra_whitespaces = False
    for text, score, kind in zip(get("tokens"), get("scores"), get("token_type")):
        p = model.pieces.add()
        # user-defined tokens stand in the file with spaces, in the model with U+2581
        p.piece, p.score, p.type = text.replace(" ", "\u2581") if kind == 4 else text, score, kind
    return model


def gguf_fields(path):
    import gguf
    return {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items()}


def reference_model(path):
    """transformers, float32, on the dequantised weights of the file."""
    import torch
    torch.set_num_threads(1)
    import transformers
    transformers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    path = pathlib.Path(path).resolve()
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager").eval()


def log_probabilities(model, ids):
    """float64 [N][V]"""
    import torch
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double(), -1).numpy()


def write_reference(path):
    """The text of NAME.ref.txt: mean nll, and per position nll and best id, of the three texts."""
    model, tok, lines = reference_model(path), FileTokenizer(gguf_fields(path)), []
    for name in TEXTS:
        ids = tok.encode((HERE / "texts" / name).read_bytes().decode())
        lp = log_probabilities(model, ids)
        nll = [0.0] + [-lp[i, ids[i + 1]] for i in range(len(ids) - 1)]
        lines.append(f"text {name} {len(ids)} {sum(nll) / (len(ids) - 1):.7f}\n")
        lines += [f"{x:.6f} {int(a)}\n" for x, a in zip(nll, lp.argmax(1))]
    return "".join(lines)


# ---- the comparison ---------------------------------------------------------------------------

def command(words, data=None, timeout=3600):
    done = subprocess.run([str(w) for w in words], input=data or b"", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{words[0]}: exit {done.returncode}: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done


def scored(line):
    words = line.split()
    return {k: float(v) for k, v in zip(words[::2], words[1::2])}


def show(name, *cells):
    print(f"{name:<14}" + "".join(f"{c:>16}" for c in cells), flush=True)


def log_softmax(logits):
    import numpy as np
    q = logits.astype(np.float64)
    q -= q.max(1, keepdims=True)
    return q - np.log(np.exp(q).sum(1, keepdims=True))


def peer_divergence(a, text, ids, lp, temp):
    """KL of llama.cpp's distributions, at the second half of the text, which is all that its perplexity tool saves
    (log-probabilities in 16 bits down to 16 below the best; what lies lower counts as one event)."""
    import numpy as np
    n = len(ids) - 4  # the text stands there several times because the tool wants two pieces: end before the seam
    (temp / "peer.txt").write_text("\n\n".join([text] * 3), encoding="utf-8", newline="")
    command([a.peer / "llama-perplexity", "-m", a.model, "-f", temp / "peer.txt", "-c", n, "--chunks", 1, "-t", a.threads,
             "-nr", "--kl-divergence-base", temp / "peer.logits"])
    raw = (temp / "peer.logits").read_bytes()
    head = np.frombuffer(raw, "<i4", 3, 8)
    seen = np.frombuffer(raw, "<i4", n, 20)
    if head[0] != n or list(seen) != ids[:n]:
        return None
    vocabulary, kl = int(head[1]), []
    rows = np.frombuffer(raw, "<u2", -1, 20 + 4 * n).reshape(n - 1 - n // 2, -1)
    for at, row in zip(range(n // 2, n - 1), rows):
        scale, low = np.frombuffer(row[:4].tobytes(), "<f4").astype(np.float64)
        code, p = row[4:4 + vocabulary], lp[at]
        known = np.flatnonzero(code)
        q = code[known] * scale + low
        rest_p, rest_q = 1 - np.exp(p[known]).sum(), 1 - np.exp(q).sum()
        kl.append((np.exp(p[known]) * (p[known] - q)).sum()
                  + (rest_p * np.log(rest_p / rest_q) if rest_p > 0 and rest_q > 0 else 0))
    return np.array(kl)


def compare_texts(a, model, tok, temp):
    import numpy as np
    bad = []
    show("text", "tokens", "ids", "KL max", "KL mean", "at", "argmax differs", "nll run", "nll ref",
         *(["peer KL max", "peer KL mean"] if a.peer else []))
    for name in TEXTS:
        path = HERE / "texts" / name
        text = path.read_bytes().decode()
        ids = tok.encode(text)
        lp = log_probabilities(model, ids)
        nll = -lp[np.arange(len(ids) - 1), ids[1:]].mean()
        cells = [len(ids)] + 6 * ["-"] + [f"{nll:.5f}"]
        if a.run:
            mine = list(map(int, command([a.run, a.model, "-m", "tokenize", "-f", path]).stdout.split()))
            cells[1] = "equal"
            if mine != ids:
                at = next((i for i, (x, y) in enumerate(zip(mine, ids)) if x != y), min(len(mine), len(ids)))
                cells[1] = f"differ at {at}"
                bad.append(f"{name}: ids differ at {at}: run {mine[at:at + 5]}, reference {ids[at:at + 5]}")
            (temp / "ids").write_text(" ".join(map(str, ids)))
            out = scored(command([a.run, a.model, "-m", "score", "--kv", "f32", "-c", max(512, len(ids)), "--ids", "-f",
                                  temp / "ids", "--logits", temp / "logits", "--threads", a.threads]).stdout.decode())
            q = log_softmax(np.fromfile(temp / "logits", "<f4").reshape(len(ids), -1))
            v = min(q.shape[1], lp.shape[1])
            kl = (np.exp(lp[:, :v]) * (lp[:, :v] - q[:, :v])).sum(1)
            cells[2:7] = [f"{kl.max():.2e}", f"{kl.mean():.2e}", int(kl.argmax()),
                          int((lp[:, :v].argmax(1) != q[:, :v].argmax(1)).sum()), f"{out['nll']:.5f}"]
            if not kl.max() < 1e-4:
                bad.append(f"{name}: KL {kl.max():.2e} at position {int(kl.argmax())}")
            if abs(out["nll"] - nll) > 1e-3:
                bad.append(f"{name}: nll {out['nll']} against {nll:.5f}")
        if a.peer:
            peer = peer_divergence(a, text, ids, lp, temp)
            cells += ["ids differ", "-"] if peer is None else [f"{peer.max():.2e}", f"{peer.mean():.2e}"]
        show(name, *cells)
    return bad


def greedy_reference(model, ids, steps):
    """Greedy continuation and the margin (difference of the two best logits) of every step."""
    import torch
    past, feed, made, margins = None, list(ids), [], []
    with torch.no_grad():
        for _ in range(steps):
            out = model(input_ids=torch.tensor([feed]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            best = out.logits[0, -1].topk(2)
            feed = [int(best.indices[0])]
            made += feed
            margins.append(float(best.values[0] - best.values[1]))
    return made, margins


def agreement(text, tok, prompt_ids, made, margins):
    """How far a greedy text follows the reference: (tokens, margin there)."""
    agreed = 0
    for i in range(len(made)):
        want = tok.decode(prompt_ids + made[:i + 1])
        if "\ufffd" in want[-2:]:
            continue
        if not text.startswith(want):
            return i, margins[agreed]
        agreed = i + 1
    return len(made), None


def compare_greedy(a, model, tok, steps=48):
    bad = []
    stops = set(model.config.eos_token_id if isinstance(model.config.eos_token_id, list) else [model.config.eos_token_id])
    print()
    show("greedy", "steps", "run follows", "margin there", "peer follows", "margin there")
    for prompt in PROMPTS:
        ids = tok.encode(prompt)
        made, margins = greedy_reference(model, ids, steps)
        for i, t in enumerate(made):
            if t in stops:
                made = made[:i]
                break
        n, margin = "-", None
        if a.run:
            mine = command([a.run, a.model, "-t", 0, "-n", len(ids) + len(made), "-i", prompt, "--kv", "f32", "-q",
                            "--threads", a.threads]).stdout.decode(errors="replace")
            n, margin = agreement(mine, tok, ids, made, margins)
        cells = [len(made), n, "-" if margin is None else f"{margin:.1e}"]
        if margin is not None and margin > 1e-2:
            bad.append(f"greedy {prompt!r}: leaves the reference after {n} tokens at a margin of {margin:.3f}")
        if a.peer:
            other = command([a.peer / "llama-completion", "-m", a.model, "-no-cnv", "-nr", "--temp", 0, "-n", len(made),
                             "-t", a.threads, "-p", prompt]).stdout.decode(errors="replace")
            other = other[other.find(prompt):]
            n, margin = agreement(other, tok, ids, made, margins)
            cells += [n, "-" if margin is None else f"{margin:.1e}"]
        show(prompt[:12].replace("\n", " "), *cells)
    return bad


def compare_perplexity(a, model, tok, temp):
    """Pieces of c ids, the second half counted, BOS in place of each piece's first id where the file asks for it."""
    import numpy as np
    text = a.long.read_bytes().decode()
    ids = tok.encode(text[:a.tokens * 8])[:a.tokens]
    while True:  # a text whose ids are exactly the first ones: cut at a line end
        cut = tok.decode(ids)
        cut = cut[:cut.rfind("\n") + 1] or cut
        if tok.encode(cut) == ids[:len(tok.encode(cut))]:
            break
        ids = ids[:-1]
    ids = tok.encode(cut)
    (temp / "long.txt").write_bytes(cut.encode())
    c, t0 = a.c, time.time()
    nll = []
    for at in range(0, len(ids) - c + 1, c):
        piece = ids[at:at + c]
        if tok.bos:
            piece = tok.bos + piece[1:]
        lp = log_probabilities(model, piece)
        nll += [-lp[i, piece[i + 1]] for i in range(c // 2, c - 1)]
        if sys.stderr.isatty():
            print(f"\r  reference {at + c} of {len(ids)} ids", end="", file=sys.stderr)
    nll = np.array(nll)
    ref_time = time.time() - t0
    t0 = time.time()
    out = scored(command([a.run, a.model, "-m", "score", "--kv", "f32", "-c", c, "-f", temp / "long.txt",
                          "--threads", a.threads]).stdout.decode()) if a.run else None
    run_time = time.time() - t0
    print()
    show("perplexity", "ids", "counted", "nll", "ppl", "error", "seconds")
    ppl = math.exp(nll.mean())
    show("transformers", len(ids), len(nll), f"{nll.mean():.5f}", f"{ppl:.5f}",
         f"{ppl * nll.std(ddof=1) / math.sqrt(len(nll)):.5f}", f"{ref_time:.0f}")
    bad = []
    if out:
        show("run", len(ids), int(out["tokens"]), f"{out['nll']:.5f}", f"{out['ppl']:.5f}", f"{out['error']:.5f}",
             f"{run_time:.0f}")
        if int(out["tokens"]) != len(nll) or abs(out["nll"] - nll.mean()) > 1e-3:
            bad.append(f"perplexity: run counts {int(out['tokens'])} at {out['nll']}, reference {len(nll)} at {nll.mean():.5f}")
    if a.peer:
        t0 = time.time()
        done = command([a.peer / "llama-perplexity", "-m", a.model, "-f", temp / "long.txt", "-c", c, "-t", a.threads, "-nr"])
        line = next(l for l in (done.stdout + done.stderr).decode().splitlines() if "Final estimate" in l)
        value, error = line.split("PPL = ")[1].split(" +/- ")
        show("llama.cpp", len(ids), "", f"{math.log(float(value)):.5f}", value, error.strip(), f"{time.time() - t0:.0f}")
    return bad


def main():
    p = argparse.ArgumentParser(description="Compare run.c with the reference on real weights.")
    p.add_argument("model", type=pathlib.Path)
    p.add_argument("--run", default=str(HERE.parent / "run"), help="the program (by default run beside the tests folder; none: the others alone)")
    p.add_argument("--peer", type=pathlib.Path, help="folder with llama.cpp's programs")
    p.add_argument("--long", type=pathlib.Path, help="a long text for perplexity")
    p.add_argument("--tokens", type=int, default=20000, help="how many of its tokens")
    p.add_argument("-c", type=int, default=512, help="ids per piece")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--only", choices=["texts", "greedy", "perplexity"])
    a = p.parse_args()
    if a.run == "none":
        a.run = None
    elif not pathlib.Path(a.run).exists():
        sys.exit(f"real.py: {a.run} not found: build it (make), or give --run")
    model, tok, bad = reference_model(a.model), FileTokenizer(gguf_fields(a.model)), []
    with tempfile.TemporaryDirectory() as temp:
        temp = pathlib.Path(temp)
        if a.only in (None, "texts"):
            bad += compare_texts(a, model, tok, temp)
        if a.only in (None, "greedy"):
            bad += compare_greedy(a, model, tok)
        if a.long and a.only in (None, "perplexity"):
            bad += compare_perplexity(a, model, tok, temp)
    print()
    for line in bad:
        print("WRONG", line)
    print("all as promised" if not bad else f"{len(bad)} wrong")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
