#!/usr/bin/env python3
"""Prints uni_runs[] of run.c, chapter 7: the general categories of Unicode 16 as runs, and checks it by expanding it.
needs: pip install unicodedata2==16.0.0

One run is one character v + '#', v = class + 11 * (length - 1) for lengths 1 to 7; a longer run has v = class + 77 and
then its length in base-32 digits '0' + d, low first, 32 added to all but the last. The class 11 of a long run stands for
pairs "Lu Ll", as many as the length says: half of the table is alphabets that alternate."""
import sys, unicodedata2 as u

assert u.unidata_version == "16.0.0"
CLASS = {"Lu": 1, "Lt": 2, "Ll": 3, "Lm": 4, "Lo": 5, "M": 6, "N": 7, "P": 8, "S": 9}
SPACE = {*range(9, 14), 32, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000}

def class_of(c):
    k = u.category(chr(c))
    return 10 if c in SPACE else CLASS.get(k, CLASS.get(k[0], 0))

def number(n):
    out = ""
    while n >= 32: out, n = out + chr(ord("0") + 32 + n % 32), n // 32
    return out + chr(ord("0") + n)

def encode(table):
    runs = []
    for k in table:
        if runs and runs[-1][0] == k: runs[-1][1] += 1
        else: runs.append([k, 1])
    out, i = "", 0
    while i < len(runs):
        pairs = 0
        while runs[i + 2 * pairs: i + 2 * pairs + 2] == [[1, 1], [3, 1]]: pairs += 1
        if pairs > 1: out, i = out + chr(35 + 88) + number(pairs), i + 2 * pairs; continue
        k, n = runs[i]
        out += chr(35 + k + 11 * (n - 1)) if n <= 7 else chr(35 + k + 77) + number(n)
        i += 1
    return out

def decode(s):
    out, i = [], 0
    while i < len(s):
        v = ord(s[i]) - 35; i += 1; n = v // 11 + 1; k = v % 11
        if n >= 8:
            n = shift = 0
            while True:
                d = ord(s[i]) - 48; i += 1; n |= (d & 31) << shift; shift += 5
                if d < 32: break
        out += [1, 3] * n if v == 88 else [k] * n
    return out

table = [class_of(c) for c in range(0x110000)]
s = encode(table)
assert decode(s) == table, "decode"
assert not __import__("re").search(r"\?\?[=()'<>!/-]", s), "trigraph"
text = s.replace("\\", "\\\\")
print("static const char uni_runs[] =")
while text:
    n = 94
    while n < len(text) and text[:n][len(text[:n].rstrip("\\")):].count("\\") % 2: n -= 1
    print('    "' + text[:n] + '"' + ("" if text[n:] else ";"))
    text = text[n:]
print(len(s), "characters", file=sys.stderr)
