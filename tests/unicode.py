#!/usr/bin/env python3
"""Prints uni_runs[] of run.c, chapter 7: the general categories of Unicode 16 as runs, and checks it by expanding it.
needs: pip install unicodedata2==16.0.0

One run is one character v + '#', v = class + 10 * length for lengths 1 to 9 (8 for the classes above 1); a longer run
has length 0 there and then its length in base-32 digits '?' + d, low first, 32 added to all but the last. Class 9 stands
for pairs "Lu Ll", as many as the length says: half of the table is alphabets that alternate. Lt counts as Lu and Lm as
Lo: every expression that tells letters apart names them together."""
import sys, unicodedata2 as u

assert u.unidata_version == "16.0.0"
CLASS = {"Lu": 0, "Lt": 0, "Ll": 1, "Lo": 2, "Lm": 2, "M": 3, "N": 4, "P": 5, "S": 6}
SPACE = {*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}
OTHER, PAIRS = 8, 9

def class_of(c):
    k = u.category(chr(c))
    return 7 if c in SPACE else CLASS.get(k, CLASS.get(k[0], OTHER))

def run(k, n):
    if k + 10 * n <= 126 - 35: return chr(35 + k + 10 * n)
    out = chr(35 + k)
    while n >= 32: out, n = out + chr(ord("?") + 32 + n % 32), n // 32
    return out + chr(ord("?") + n)

def encode(table):
    runs = []
    for k in table:
        if runs and runs[-1][0] == k: runs[-1][1] += 1
        else: runs.append([k, 1])
    out, i = "", 0
    while i < len(runs):
        pairs = 0
        while runs[i + 2 * pairs: i + 2 * pairs + 2] == [[0, 1], [1, 1]]: pairs += 1
        if pairs: out, i = out + run(PAIRS, pairs), i + 2 * pairs
        else: out, i = out + run(*runs[i]), i + 1
    return out

def decode(s):
    out, i = [], 0
    while i < len(s):
        n, k = divmod(ord(s[i]) - 35, 10); i += 1
        if not n:
            shift = 0
            while True:
                d = ord(s[i]) - 63; i += 1; n |= (d & 31) << shift; shift += 5
                if d < 32: break
        out += [0, 1] * n if k == PAIRS else [k] * n
    return out

table = [class_of(c) for c in range(0x110000)]
s = encode(table)
assert decode(s) == table, "decode"
assert not __import__("re").search(r"\?\?[=()'<>!/-]", s), "trigraph"
text = s.replace("\\", "\\\\")
print("static const char uni_runs[] =")
while text:
    n = 98
    while n < len(text) and text[:n][len(text[:n].rstrip("\\")):].count("\\") % 2: n -= 1
    print('"' + text[:n] + '"' + ("" if text[n:] else ";"))
    text = text[n:]
print(len(s), "characters", file=sys.stderr)
