#!/usr/bin/env python3
"""Compiles every CUDA kernel of eaglet to machine code with NVRTC and prints what each costs. Needs no GPU.

    python3 -m venv venv
    venv/bin/pip install --no-deps nvidia-cuda-nvrtc==13.2.86
    venv/bin/python tests/gpu/cubins.py [--markdown] [sm_90 ...]

The program texts and options are those that eaglet gives to NVRTC at start. The exit code is 1 if a kernel does not
compile, or spills registers to memory.
"""

import argparse
import ctypes
import pathlib
import re
import site
import sys

KERNELS = pathlib.Path(__file__).resolve().parents[2] / "runtime/src/cuda/kernels"
ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "sm_120"]
# Widths of heads: Llama and Qwen, SmolLM2 and others, DeepSeek's MLA, Gemma.
HEADS = [(64, 64), (128, 128), (192, 128), (256, 256)]


def find():
    folders = [*site.getsitepackages(), *sys.path]
    for folder in map(pathlib.Path, folders):
        for name in ("libnvrtc.so.13", "libnvrtc.so.12"):
            for path in sorted(folder.glob(f"nvidia/*/lib/{name}")):
                return path
    sys.exit("no libnvrtc found: install the wheel nvidia-cuda-nvrtc into this Python's environment")


def compile(nvrtc, name, source, options):
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    words = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    code = nvrtc.nvrtcCompileProgram(program, len(options), words)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(max(size.value, 1))
    nvrtc.nvrtcGetProgramLog(program, log)
    if code == 0:
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(max(size.value, 1))
        nvrtc.nvrtcGetCUBIN(program, cubin)
        code = 0 if cubin.raw[:4] == b"\x7fELF" else -1
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log.value.decode()


def costs(log):
    """What ptxas says of each kernel: registers, static shared bytes, spilled bytes."""
    for part in re.split(r"Compiling entry function '", log)[1:]:
        kernel = part.split("'")[0]
        number = lambda pattern: int((re.search(pattern, part) or [0, 0])[1])
        yield kernel, number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"), number(r"(\d+) bytes spill stores")


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("architectures", nargs="*", default=ARCHITECTURES)
    arguments.add_argument("--markdown", action="store_true")
    arguments = arguments.parse_args()
    path = find()
    nvrtc = ctypes.CDLL(str(path))
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    print(f"NVRTC {major.value}.{minor.value}, {path.name}")

    common = (KERNELS / "common.cuh").read_text()
    programs = []
    for file in sorted(KERNELS.glob("*.cu")):
        if file.stem == "attention":
            for head, value in HEADS:
                programs.append((f"attention {head}/{value}", file, [f"-DHEAD_DIM={head}", f"-DVALUE_DIM={value}"]))
        else:
            programs.append((file.stem, file, []))

    table, failed = {}, False
    for title, file, defines in programs:
        for architecture in arguments.architectures:
            options = ["--std=c++17", "--ptxas-options=-v", *defines, f"--gpu-architecture={architecture}"]
            code, log = compile(nvrtc, file.name, common + file.read_text(), options)
            if code != 0:
                failed = True
                print(f"{title} does not compile for {architecture}: {log}", file=sys.stderr)
                continue
            for kernel, registers, shared, spilled in costs(log):
                table.setdefault((title, kernel), {})[architecture] = (registers, shared, spilled)
                failed |= spilled > 0

    row = (lambda cells: "| " + " | ".join(cells) + " |") if arguments.markdown else "  ".join
    width = max((len(kernel) for _, kernel in table), default=0)
    cells = lambda title, kernel, rest: row([title.ljust(17), kernel.ljust(width), *(cell.rjust(8) for cell in rest)])
    print(cells("program", "kernel", [*arguments.architectures, "shared"]))
    if arguments.markdown:
        print(row(["---", "---", *["---:"] * (len(arguments.architectures) + 1)]))
    for (title, kernel), found in table.items():
        registers = []
        for architecture in arguments.architectures:
            used, _, spilled = found.get(architecture, ("failed", 0, 0))
            registers.append(f"{used}" if not spilled else f"{used}+{spilled}B")
        print(cells(title, kernel, [*registers, str(max(shared for _, shared, _ in found.values()))]))
    print(f"{len(table)} kernels: registers of a thread by architecture, static shared bytes of a block")
    return 1 if failed or not table else 0


if __name__ == "__main__":
    sys.exit(main())
