#!/bin/sh
# fuzz/smoke.sh [SECONDS]: libFuzzer on everything that reads a file, starting from the small models of tests/.
# Needs clang with its fuzzer runtime (Debian: clang, libclang-rt-14-dev). New inputs and crashes go to a
# temporary folder; a crash is kept and named.
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-60}
work=$(mktemp -d)
if ! clang -std=c11 -g -O1 -DFUZZ -DPLAIN_C -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
    test.c -o "$work/fuzz" -lm 2>"$work/log"; then
    if grep -q "libclang_rt\|fsanitize=fuzzer\|cannot find" "$work/log"; then
        echo "skip: clang has no fuzzer runtime here"
        exit 0
    fi
    cat "$work/log"
    exit 1
fi
mkdir "$work/seeds"
cp tests/gqa.gguf tests/gpt-oss-mxfp4.gguf tests/gemma3.gguf tests/phi3-long.gguf tests/bpe.gguf tests/quant-q4_1.gguf tests/bin-v0.bin tests/bin-v2.bin tests/bin-v0.tokenizer.bin "$work/seeds"
ASAN_OPTIONS=detect_leaks=0 "$work/fuzz" -max_total_time="$seconds" -rss_limit_mb=6000 -malloc_limit_mb=2000 -timeout=20 \
    -max_len=200000 -artifact_prefix="$work/" -print_final_stats=1 "$work/seeds" >"$work/log" 2>&1 ||
    { tail -n 40 "$work/log"; echo "a crash is kept in $work"; exit 1; }
grep -E "number_of_executed_units" "$work/log"
rm -rf "$work"
