"""run.py PROGRAMS MODELS [--shapes a,b] [--formats bf16,bf16-plain,q8,q4] [--threads 2] [--rounds 5]

Runs this project and llama.cpp in turn on the same shapes, with as many threads on one NUMA node, in one quiet run, and
prints a table of medians and ratios; with --machine, which a calibration wrote, also what was forecast, and how fast
memory was read right after ours. bf16 is held as plans hold it, which may be in 12 bits, bf16-plain in 16.
PROGRAMS is the folder of hybridc and hybrid-exec, MODELS a folder of folders made by make_model.py.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
PLAIN = "-plain"


def ours(arguments, plan, prefill, decode, depth, sequences=1):
    command = [f"{arguments.programs}/hybrid-exec", "bench", str(plan), "-r", "1", "-o", "json",
               "-p", str(prefill), "-n", str(decode), "-d", str(depth), "--sequences", str(sequences),
               "--threads", str(arguments.threads)]
    tests = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    memory = [device["now_bytes_per_sec"] for test in tests for device in test.get("memory") or []]
    rate = {test["kind"]: (test["tokens_per_sec"], test["forecast_tokens_per_sec"], max(memory, default=None))
            for test in tests}
    return rate.get("prefill"), rate.get("decode")


def theirs(arguments, model, prefill, decode, depth):
    command = [sys.executable, str(HERE / "llama_cpp_bench.py"), str(model), str(arguments.threads),
               str(prefill), str(decode), str(depth)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return tuple((answer[f"{kind}_tokens_per_sec"], None, None) for kind in ("prefill", "decode"))


def compile_plan(arguments, folder, form, sequences):
    plan = folder / f"{form}-{sequences}.plan.ron"
    command = [f"{arguments.programs}/hybridc", "compile", str(folder), "-o", str(plan),
               "--format", form.removesuffix(PLAIN), "--max-sequences", str(sequences), "--context", "4352",
               "--pipeline", "numa0"]
    if form.endswith(PLAIN):
        command.append("--plain-bf16")
    if arguments.machine:
        command += ["--machine", arguments.machine]
    subprocess.run(command, check=True)
    return plan


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("programs")
    parser.add_argument("models", type=pathlib.Path)
    parser.add_argument("--shapes", default="llama-1.1b,qwen2.5-0.5b")
    parser.add_argument("--formats", default="bf16,bf16-plain,q8,q4")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--machine")
    arguments = parser.parse_args()

    def median(runs, which=0, unit=1):
        values = [run[which] for run in runs if run[which] is not None]
        return statistics.median(values) / unit if values else float("nan")

    print("| model | format | test | ours, tok/s | forecast | memory, GB/s | llama.cpp, tok/s | ratio |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for shape in arguments.shapes.split(","):
        folder = arguments.models / shape
        for form in arguments.formats.split(","):
            plan = compile_plan(arguments, folder, form, 1)
            model = folder / f"{form.removesuffix(PLAIN)}.gguf"
            rows = {"prefill 512": ([], []), "decode 64 after 512": ([], []), "decode 32 after 4096": ([], [])}
            for _ in range(arguments.rounds):
                for side, run in ((0, ours), (1, theirs)):
                    target = model if side else plan
                    prefill, decode = run(arguments, target, 512, 64, 512)
                    rows["prefill 512"][side].append(prefill)
                    rows["decode 64 after 512"][side].append(decode)
                    rows["decode 32 after 4096"][side].append(run(arguments, target, 0, 32, 4096)[1])
            for test, (mine, peer) in rows.items():
                a, b = median(mine), median(peer)
                print(f"| {shape} | {form} | {test} | {a:.1f} | {median(mine, 1):.1f} | {median(mine, 2, 1e9):.0f} "
                      f"| {b:.1f} | {a / b:.2f} |", flush=True)
            batched = compile_plan(arguments, folder, form, 8)
            one, eight = [], []
            for _ in range(arguments.rounds):
                one.append(ours(arguments, plan, 0, 64, 0)[1])
                eight.append(ours(arguments, batched, 0, 64, 0, sequences=8)[1])
            a, b = median(eight), median(one)
            print(f"| {shape} | {form} | 8 sequences against 1 | {a:.1f} | {median(eight, 1):.1f} "
                  f"| {median(eight, 2, 1e9):.0f} | {b:.1f} (ours) | {a / b:.2f} |", flush=True)


if __name__ == "__main__":
    main()
