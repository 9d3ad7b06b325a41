#!/usr/bin/env python3
"""bench.py: how fast is run.c here, beside its peers? Every round runs each program once, so that all meet the same machine.

    python3 bench/bench.py models/real/smollm2.gguf
    python3 bench/bench.py --llama-bench PATH/llama-bench --llama2c PATH/llama2.c *.gguf *.bin --out bench/mymachine.csv
    python3 bench/bench.py --plot bench/mymachine.csv        (needs matplotlib; writes bench/mymachine.svg)

The peers are optional: llama.cpp by its llama-bench (and llama-completion beside it, for starts), or by the Python package
llama-cpp-python where that is installed; llama2.c by a folder in which `make runomp` was done. Measured are a prompt of 512
tokens, 64 tokens decoded at depths 0, 512 and 4,096 as the model's context allows, and whole starts: load, a prompt of about 8
tokens, one token, exit (phase "start", in starts a second). llama2.c decodes 256 tokens, and reads a prompt of about 300, which
stands beside run.c's 512. Written are medians, extremes, the ratio of medians, and GB/s beside what plain read loops reach
(bench/roof.c). Close other programs first: they cost more than any kernel gains.
"""
import argparse, csv, datetime, os, pathlib, platform, re, shutil, statistics, struct, subprocess, sys, tempfile, time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
SHORT_PROMPT = "Once upon a time there was a"
LONG_PROMPT = "Once upon a time there was a little girl who had a red ball and a dog. " * 15
FIELDS = ("date machine model types program phase tokens depth threads median low high gb_per_s roof_gb_per_s rounds "
          "ratio").split()


def output(command, **options):
    """stdout of a command, or None with a note on stderr."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900, **options)
    except (OSError, subprocess.TimeoutExpired) as why:
        print(f"bench.py: {command[0]}: {why}", file=sys.stderr)
        return None
    if done.returncode:
        print(f"bench.py: {command[0]}: status {done.returncode}: {done.stderr.strip()[-300:]}", file=sys.stderr)
        return None
    return done.stdout + done.stderr if options.get("cwd") else done.stdout


def machine():
    try:
        names = re.findall(r"model name\s*:\s*(.*)", open("/proc/cpuinfo").read())
    except OSError:
        names = []
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


def roof(threads):
    """The better of two read loops in GB/s, or None without a compiler."""
    with tempfile.TemporaryDirectory() as temp:
        program = pathlib.Path(temp) / "roof"
        if output([os.environ.get("CC", "cc"), "-O3", "-march=native", "-fopenmp", HERE / "roof.c", "-o", program]) is None:
            return None
        text = output([program, threads]) or ""
    return max(map(float, re.findall(r"GB/s ([\d.]+)", text)), default=None)


# Each of these yields (phase, tokens, depth, tokens/s, GB/s or None).
def run_c(args, model):
    room = ["-c", args.context] if args.context else []
    text = output([args.run, model, "-m", "bench", "--threads", args.threads, "-q", *room]) or ""
    for row in csv.DictReader(text.splitlines()):
        yield row["phase"], int(row["tokens"]), int(row["depth"]), float(row["tokens_per_s"]), float(row["gb_per_s"])


def llama_bench(args, model, depths):
    text = output([args.llama_bench, "-m", model, "-p", 512, "-n", 0, "-t", args.threads, "-r", 1, "-o", "csv"]) or ""
    text += "\n" + (output([args.llama_bench, "-m", model, "-p", 0, "-n", 64, "-d", ",".join(map(str, depths)), "-t",
                            args.threads, "-r", 1, "-o", "csv"]) or "")
    for part in text.split("\n\n") if "\n\n" in text else [text]:
        for row in csv.DictReader(line for line in part.splitlines() if line.startswith(('"', "build_commit"))):
            if row["n_prompt"].isdigit():
                prompt = int(row["n_prompt"])
                yield ("prefill" if prompt else "decode", prompt or int(row["n_gen"]), int(row["n_depth"]),
                       float(row["avg_ts"]), None)


def llama_cpp_python(args, model, depths):
    import llama_cpp
    most = max(depths) + 64
    llama = llama_cpp.Llama(str(model), n_ctx=max(most, 512), n_threads=args.threads, n_threads_batch=args.threads,
                            verbose=False)
    ids = [7 + i * 31 % 900 for i in range(max(most, 512))]
    llama.eval(ids[:8])
    llama.reset()
    start = time.perf_counter()
    llama.eval(ids[:512])
    yield "prefill", 512, 0, 512 / (time.perf_counter() - start), None
    for depth in depths:
        llama.reset()
        if depth:
            llama.eval(ids[:depth])
        start = time.perf_counter()
        for i in range(64):
            llama.eval([ids[depth + i]])
        yield "decode", 64, depth, 64 / (time.perf_counter() - start), None


def llama2c(args, model):
    magic, version = struct.unpack("<II", open(model, "rb").read(8))
    program = args.llama2c / ("runq" if (magic, version) == (0x616B3432, 2) else "run")
    for phase, tokens, options in (("decode", 64, ["-n", 256]), ("prefill", 300, ["-n", 300, "-i", LONG_PROMPT])):
        text = output([program, model.resolve(), "-t", 0, *options, "-z", args.tokenizer.resolve()],
                      cwd=args.llama2c, env=dict(os.environ, OMP_NUM_THREADS=str(args.threads))) or ""
        found = re.search(r"achieved tok/s: ([\d.]+)", text)
        if found:
            yield phase, tokens, 0, float(found[1]), None


def starts(command):
    """Whole starts a second, the best of three: what is measured is the program, not the disk."""
    best = 0
    for _ in range(3):
        begin = time.perf_counter()
        if output(command) is None:
            return
        best = max(best, 1 / (time.perf_counter() - begin))
    yield "start", 8, 0, best, None


def measure(args):
    import importlib.util
    have_python = importlib.util.find_spec("llama_cpp") is not None
    limit, rows, name = roof(args.threads), [], machine()
    print(f"{name}; {args.threads} threads; plain reads: {limit} GB/s", file=sys.stderr)
    for model in args.models:
        seen, gbs, counts = {}, {}, {}
        info = output([args.run, model, "-m", "info"]) or ""
        types = re.search(r"^types: (.*)", info, re.M)
        # -n counts positions: as many as the prompt has, and one token comes out, as with llama-completion's -n 1
        length = len((output([args.run, model, "-m", "tokenize", "-i", SHORT_PROMPT]) or "").split())
        for number in range(args.rounds):
            results = {"run.c": list(run_c(args, model))}
            if length:
                results["run.c"] += starts([args.run, model, "-i", SHORT_PROMPT, "-n", length, "-t", 0, "-c", 512, "--threads",
                                            args.threads, "-q"])
            depths = [d for phase, _, d, *_ in results["run.c"] if phase == "decode"] or [0]
            if model.suffix == ".bin":
                if args.llama2c:
                    results["llama2.c"] = list(llama2c(args, model))
            elif args.llama_bench:
                results["llama.cpp"] = list(llama_bench(args, model, depths))
                completion = pathlib.Path(args.llama_bench).with_name("llama-completion")
                if completion.exists():
                    results["llama.cpp"] += starts([completion, "-m", model, "-p", SHORT_PROMPT, "-n", 1, "-t", args.threads, "-c",
                                                    512, "--no-warmup", "-no-cnv", "--temp", 0])
            elif have_python:
                results["llama.cpp"] = list(llama_cpp_python(args, model, depths))
            for program, lines in results.items():
                for phase, tokens, depth, rate, gb in lines:
                    seen.setdefault((phase, depth, program), []).append(rate)
                    gbs.setdefault((phase, depth, program), []).append(gb)
                    counts[phase, program] = tokens
            print(f"{model.name}: round {number + 1} of {args.rounds}", file=sys.stderr)
        for (phase, depth, program), rates in sorted(seen.items()):
            median = statistics.median(rates)
            ours = seen.get((phase, depth, "run.c"))
            gb = gbs[phase, depth, program]
            rows.append(dict(
                date=datetime.date.today().isoformat(), machine=name, model=model.name, types=types[1] if types else "",
                program=program, phase=phase, tokens=counts[phase, program], depth=depth, threads=args.threads,
                median=f"{median:.2f}", low=f"{min(rates):.2f}", high=f"{max(rates):.2f}",
                gb_per_s=f"{statistics.median(gb):.2f}" if gb[0] is not None else "", roof_gb_per_s=limit or "",
                rounds=len(rates), ratio=f"{statistics.median(ours) / median:.2f}" if ours and program != "run.c" else ""))
            print("  ".join(str(rows[-1][field]) for field in ("model", "program", "phase", "depth", "median", "gb_per_s", "ratio")))
    if args.out:
        new = not args.out.exists()
        with open(args.out, "a", newline="") as file:
            out = csv.DictWriter(file, FIELDS, lineterminator="\n")
            if new:
                out.writeheader()
            out.writerows(rows)


def plot(path):
    """Three panels: decode and prefill by file, run.c and the peer side by side; decode against depth."""
    import matplotlib
    matplotlib.use("svg")
    from matplotlib import pyplot
    matplotlib.rcParams["svg.hashsalt"] = "run.c"
    rows = list(csv.DictReader(open(path)))
    if not rows:
        return print(f"bench.py: {path}: no rows", file=sys.stderr)
    models = list(dict.fromkeys(row["model"] for row in rows))
    programs = [name for name in ("run.c", "llama.cpp", "llama2.c") if any(row["program"] == name for row in rows)]
    colours = {"run.c": "#1f5fa8", "llama.cpp": "#e08a2c", "llama2.c": "#8a8a8a"}
    speed = {(row["model"], row["program"], row["phase"], int(row["depth"])): float(row["median"]) for row in rows}
    figure, panels = pyplot.subplots(1, 3, figsize=(16, 0.36 * len(models) + 2.2), width_ratios=(1, 1, 0.9))
    for panel, phase in zip(panels, ("decode", "prefill")):
        for number, program in enumerate(programs):
            values = [speed.get((model, program, phase, 0), 0) for model in models]
            panel.barh([i + 0.27 * number for i in range(len(models))], values, 0.25, label=program, color=colours[program])
        panel.set_yticks([i + 0.27 for i in range(len(models))], models if phase == "decode" else [])
        panel.set_xscale("log")
        panel.invert_yaxis()
        panel.set_xlabel(f"{phase}, tokens/s")
    panels[0].legend()
    for model in models:
        for program in programs:
            depths = sorted((d, v) for (m, p, phase, d), v in speed.items() if (m, p, phase) == (model, program, "decode"))
            if len(depths) > 1:
                panels[2].plot(*zip(*depths), marker="o", color=colours[program])
                panels[2].annotate(model if program == "run.c" else "", depths[-1], fontsize=7)
    panels[2].set_xlabel("positions in the cache")
    panels[2].set_ylabel("decode, tokens/s")
    panels[2].set_yscale("log")
    figure.suptitle(f"{rows[0]['machine']}, {rows[0]['threads']} threads, {rows[0]['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})


def main():
    p = argparse.ArgumentParser(description="Measure run.c and its peers.")
    p.add_argument("models", nargs="*", type=pathlib.Path, help="GGUF files, or .bin files of llama2.c")
    p.add_argument("--run", default=ROOT / "run", help="the program (default: ./run, which make builds)")
    p.add_argument("--llama-bench", help="path of llama.cpp's llama-bench")
    p.add_argument("--llama2c", type=pathlib.Path, help="folder of llama2.c with `run` and `runq` built by `make runomp`")
    p.add_argument("--tokenizer", type=pathlib.Path, default=ROOT / "tokenizer.bin", help="for llama2.c")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    p.add_argument("--context", type=int, help="positions of the cache: 512 leaves out the deeper decodes")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--out", type=pathlib.Path, help="CSV file to append to")
    p.add_argument("--plot", type=pathlib.Path, metavar="CSV", help="draw what a CSV file holds, beside it as SVG")
    args = p.parse_args()
    if args.plot:
        return plot(args.plot)
    if not args.models:
        p.error("name a model")
    if not pathlib.Path(args.run).exists() and not shutil.which(str(args.run)):
        p.error(f"{args.run}: not built yet (make)")
    measure(args)


if __name__ == "__main__":
    main()
