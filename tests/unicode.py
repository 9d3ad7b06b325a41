#!/usr/bin/env python3
"""Prints uni_table[] of run.c, chapter 7: what Unicode 16 says about classes, combining classes and canonical
decompositions, as numbers packed by a range coder; then checks it by reading it back as uni_new() does.
needs: pip install unicodedata2==16.0.0

The numbers, in order (`kind` is the coder's context: numbers of one kind are alike):
  for each run of code points of one class: the class, the length - 1; in runs of marks, for each its combining class
  94 times: a second element, as the distance from the one before; 0 to 3 stand for "none" (the list begins with them)
  for each code point that decomposes: distance from the one before; place of its second element in the list, which then
  moves to the front (of the four nones the one that tells where to look for the first element: see block());
  first element, as a signed distance from the last one; with a second element: is it left apart by composition?"""
import sys, unicodedata2 as u

assert u.unidata_version == "16.0.0"
CLASSES = ["Lu Lt", "Ll", "Lo Lm", "Han", "M", "N", "P", "S", "space"]  # from 1 on, as in run.c's enum
M = 5
SPACE = {*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
HAN = [(0x3005, 0x3005), (0x303B, 0x303B), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)]
COUNT, BASE, LEAST, CAP = 0x110000, 91, 1 << 24, 64
ALPHABET = [chr(c) for c in range(33, 127) if chr(c) not in '"?\\']  # no quotes, escapes or trigraphs

def class_of(c):
    k = "space" if c in SPACE else u.category(chr(c))
    if k in ("Lo", "Lm") and any(a <= c <= b for a, b in HAN): k = "Han"
    return next((i for i, names in enumerate(CLASSES, 1) if k in names.split() or k[0] in names.split()), 0)

def block(c): return 0 if c < 0x3400 else 1 if c < 0x4E00 else 2 if c < 0x20000 else 3
def zigzag(d): return 2 * d if d >= 0 else -2 * d - 1

class Packer:  # pack() when `text` is None, else unpack
    def __init__(self, text=None):
        self.chance, self.range, self.low, self.digits, self.text = {}, 1, 0, 0, text

    def bit(self, context, bit):
        while self.range < LEAST:
            self.range, self.low, self.digits = self.range * BASE, self.low * BASE, self.digits + 1
            if self.text: self.low += ALPHABET.index(self.text[self.digits - 1])
        p = self.chance.get(context, 2048)
        bound = (self.range >> 12) * p
        if self.text: bit = self.low < bound
        if bit: self.range = bound
        else: self.range, self.low = self.range - bound, self.low + (-bound if self.text else bound)
        self.chance[context] = p + (4096 - p >> 3) if bit else p - (p >> 3)
        return int(bit)

    def number(self, kind, n=0):
        n, length, value = n + 1, 0, 1
        while self.bit((kind, length, 0), length < n.bit_length() - 1): length += 1
        for i in reversed(range(length)):
            value = 2 * value + self.bit((kind, length, value if value < CAP else CAP + i), n >> i & 1)
        return value - 1

    def finish(self):
        out, n = [], self.low + self.range // 2  # any number of the range will do
        for _ in range(self.digits): out.append(ALPHABET[n % BASE]); n //= BASE
        return "".join(reversed(out))

classes = [class_of(c) for c in range(COUNT)]
ccc = [u.combining(chr(c)) for c in range(COUNT)]
assert not any(ccc[c] and classes[c] != M for c in range(COUNT))
splits = {}
for c in range(COUNT):
    d = u.decomposition(chr(c))
    if d and "<" not in d: splits[c] = tuple(int(x, 16) for x in d.split())
SECONDS = [0, 1, 2, 3] + sorted({x[1] for x in splits.values() if len(x) > 1})
assert not any(x[1] in splits for x in splits.values() if len(x) > 1)

def walk(p):  # the same order packs and unpacks: unpacking, what is handed in is not looked at
    out_class, out_ccc, out_splits = [], {}, {}
    k = 0
    while len(out_class) < COUNT:
        at = n = len(out_class)
        while n < COUNT and classes[n] == classes[at]: n += 1
        k = p.number(k, classes[at])
        n = p.number(10 + k, n - at - 1) + 1
        out_class += [k] * n
        if k == M:
            for c in range(at, at + n): out_ccc[c] = p.number(40 + out_ccc.get(c - 1, 0), ccc[c])
    seconds = SECONDS[:4]
    for i in range(4, len(SECONDS)): seconds.append(seconds[-1] + p.number(20, SECONDS[i] - SECONDS[i - 1]))
    c = place = apart = 0
    last = [0] * 5
    for code in sorted(splits):
        first = splits[code][0]
        second = splits[code][1] if len(splits[code]) > 1 else block(first)
        c += p.number(21, code - c)
        place = p.number(22 + min(place, 2), 0 if p.text else seconds.index(second))
        second = seconds.pop(place)
        seconds.insert(0, second)
        s = min(second, 4)
        d = p.number(27 + s + 5 * min(place, 1), zigzag(first - last[s]))
        last[s] += -(d + 1 >> 1) if d & 1 else d >> 1
        if s == 4:
            apart = p.number(25 + apart, int(u.normalize("NFC", chr(first) + chr(second)) != chr(code)))
        out_splits[c] = (last[s], second, apart) if s == 4 else (last[s],)
    return out_class, out_ccc, out_splits

packer = Packer()
walk(packer)
s = packer.finish()
out_class, out_ccc, out_splits = walk(Packer(s + "!" * 8))
assert out_class == classes and all(out_ccc.get(c, 0) == ccc[c] for c in range(COUNT))
assert {c: x[:2] for c, x in out_splits.items()} == splits
assert all(x[2] == (u.normalize("NFC", chr(x[0]) + chr(x[1])) != chr(c)) for c, x in out_splits.items() if len(x) > 2)
print("static const char uni_table[] =")
for i in range(0, len(s), 98): print('"' + s[i:i + 98] + '"' + ("" if i + 98 < len(s) else ";"))
print(len(s), "characters,", len(splits), "decompositions,", len(SECONDS), "seconds,",
      sum(len(x) > 2 and not x[2] for x in out_splits.values()), "joins", file=sys.stderr)

digest = 0                              # test.c computes the same from run.c's functions
def add(n):
    global digest
    digest = (digest * 1000003 + n) % 2**64
for c in range(COUNT):
    if 0xD800 <= c < 0xE000: continue
    add(classes[c])
    for text in (chr(c), chr(c) + "\u0345\u0301\u0323", "\u0061\u030A" + chr(c), "\uAC00" + chr(c)):
        for x in u.normalize("NFC", text): add(ord(x))
print("digest for test.c: 0x%X" % digest, file=sys.stderr)
