"""Break one kernel at a time and see the suite turn red.

    python tests/mutate.py [--only WORD] [--baseline] [--list]

Works on a temporary copy of the tree, built at -O1, which gives the same bits: each
mutant replaces one piece of text, rebuilds what depends on it and runs the part of the
suite that should notice. Prints a table; exits 1 where a mutant survives or its text is
not found exactly once. ``--baseline`` builds one instruction set, in a third of the
time; the mutants break what all of them share.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("csrc", "cmake", "python", "tests", "CMakeLists.txt", "pyproject.toml")
HADAMARD = ("test_hadamard.py",)
QUANTIZE = ("test_quantize.py", "test_quantize_contract.py")
FORMATS = ("test_formats.py", "test_formats_contract.py", "test_codes_oracle.py")
FIXED_POINT = ("test_fixed_point.py",)
FEEDBACK = ("test_feedback.py",)
REDUCE = ("test_reduce.py",)


class Mutant(NamedTuple):
    """``old`` in csrc becomes ``new``; one of ``tests`` in tests/kernels must fail."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    Mutant(
        "clamp removed",
        "clamped(rounded<kStochastic>(p, byte), -limit, limit)",
        "rounded<kStochastic>(p, byte)",
        QUANTIZE,
    ),
    Mutant(
        "ties away from zero",
        "rounding_offsets(bytes));\n  return round_nearest(p);",
        "rounding_offsets(bytes));\n  return round_down(p + 0.5f);",
        QUANTIZE,
    ),
    Mutant(
        "random words in another order",
        "joined(s.word[2], s.word[3])",
        "joined(s.word[3], s.word[2])",
        QUANTIZE,
    ),
    Mutant(
        "draws counted from the span",
        "first_block_(span.begin / args.format.block_size)",
        "first_block_(0)",
        QUANTIZE,
    ),
    Mutant(
        "residual with the wrong sign",
        "put_errors(errors, at, a - decoded, streams);",
        "put_errors(errors, at, decoded - a, streams);",
        QUANTIZE,
    ),
    Mutant(
        "owner's error replaces the residual",
        "const Floats after = before + error;",
        "const Floats after = error;",
        QUANTIZE,
    ),
    Mutant(
        "gradient added to the residual",
        "before - load_floats<T>(input, i);",
        "before + load_floats<T>(input, i);",
        FEEDBACK,
    ),
    Mutant(
        "a sum's lanes are not looked at",
        "lanes = larger(lanes, magnitude_of(widen<T>(y)));\n      put_elements<T>(args",
        "put_elements<T>(args",
        REDUCE,
    ),
    Mutant(
        "a sum's last elements are not looked at",
        "most = bits > most ? bits : most;\n    store(args.output.data, i, y);",
        "store(args.output.data, i, y);",
        REDUCE,
    ),
    Mutant(
        "running sum read from the version that is written",
        "load_floats<float>(sum.old_values, i)",
        "load_floats<float>(sum.new_values, i)",
        FEEDBACK,
    ),
    Mutant(
        "residual versions swapped",
        "ResidualSpan{base(current), base(1 - current)}",
        "ResidualSpan{base(1 - current), base(current)}",
        ("test_cast.py", "test_quantize.py"),
    ),
    Mutant(
        "stale bits in the last byte",
        "store_word(pack_word(group, count, Code::kBits),",
        "store_word(pack_word(group, kPackGroup, Code::kBits),",
        QUANTIZE,
    ),
    Mutant(
        "codes end at their first byte",
        "if (bit % 8 + Code::kBits > 8)",
        "if (false)",
        FORMATS,
    ),
    Mutant(
        "Inf is no NaN block",
        "if (!is_finite(absmax)) {",
        "if (absmax != absmax) {",
        QUANTIZE,
    ),
    Mutant(
        "scale of the largest numbers overflows",
        "if (is_finite(largest * decode_scale<C>(f.scales, bits, head))) return bits;",
        "return bits;",
        QUANTIZE,
    ),
    Mutant(
        "reciprocal of a denormal overflows",
        "if (s.scale >= C(0x1p-100) || (has_power_scales(f) && s.scale > 0)) {",
        "if (s.scale > 0) {",
        QUANTIZE,
    ),
    Mutant(
        "partial sums combined in another order",
        "(four[0] + four[2]) + (four[1] + four[3])",
        "(four[0] + four[1]) + (four[2] + four[3])",
        FORMATS,
    ),
    Mutant(
        "powers of two round down",
        "(bits + ((uint64_t{1} << 52) - 1)) >> 52",
        "bits >> 52",
        FORMATS,
    ),
    Mutant(
        "head of e4m3 scales without their largest value",
        "absmax / (kMost * largest)",
        "absmax / largest",
        FORMATS,
    ),
    Mutant(
        "offsets rounded up",
        "bits.offset = nearest_scale(f.scales, least * half, head, false);",
        "bits.offset = nearest_scale(f.scales, least * half, head, true);",
        FORMATS,
    ),
    Mutant(
        "a non-finite block reaches the head",
        "if (is_finite(of_block)) note(of_block);",
        "note(of_block);",
        FORMATS,
    ),
    Mutant(
        "small floats do not saturate",
        "clipped_magnitude(p, Format::kLargestNumber)",
        "magnitude_of(p)",
        FORMATS,
    ),
    Mutant(
        "ties of small floats to odd",
        "bits_as<Floats>(exponent + kMagic);\n    const Ints code =\n",
        "bits_as<Floats>(exponent + kMagic + 1);\n    const Ints code = -1 +\n",
        FORMATS,
    ),
    Mutant(
        "powers of two never carry",
        "y + ((widen_bytes(bytes) << 15) | (1 << 14))",
        "y",
        FORMATS,
    ),
    Mutant(
        "a random sign sees half its noise",
        "(rounding_offsets(bytes) * 2.0f - 1.0f)",
        "(rounding_offsets(bytes) - 0.5f)",
        FORMATS,
    ),
    Mutant(
        "fives packed from the other end",
        "load<Digits>(codes + plane * width, 0)",
        "load<Digits>(codes + (4 - plane) * width, 0)",
        FORMATS,
    ),
    Mutant(
        "an owner's error stays rotated",
        "values, n);\n    if (rotation) rotation.unrotate(values, first, n);",
        "values, n);",
        ("test_rotated.py",),
    ),
    Mutant(
        "the smallest exponent wins",
        "Word of(Word a, Word b) { return a > b ? a : b; }",
        "Word of(Word a, Word b) { return a < b ? a : b; }",
        FIXED_POINT,
    ),
    Mutant(
        "fixed-point codes leave their range",
        "p = p > low ? p : low;",
        "",
        FIXED_POINT,
    ),
    Mutant(
        "fp64 narrows in two roundings",
        "narrow = narrow_to_odd(x);",
        "narrow = static_cast<float>(x);",
        ("test_cast.py", "test_properties.py"),
    ),
    Mutant(
        "sum in another order of ranks",
        "acc += load_floats<T>(args.parts.rows[rank].data, i);",
        "acc += load_floats<T>(args.parts.rows[args.parts.count - rank].data, i);",
        ("test_reduce.py",),
    ),
    Mutant(
        "saturate keeps NaN",
        "out = magnitude > inf ? Raw<T>{0} : out;",
        "",
        ("test_reduce.py",),
    ),
    Mutant(
        "overflow to Inf enters the residual",
        "choose(finite_mask(decoded), a - decoded, old_values)",
        "a - decoded",
        ("test_cast.py",),
    ),
    Mutant(
        "a rotation's draw serves twice",
        "draws_.bytes_of(draw++)",
        "draws_.bytes_of(draw)",
        HADAMARD,
    ),
    Mutant(
        "levels of a rotation in another order",
        "lane_butterfly<2>(lane_butterfly<1>(x))",
        "lane_butterfly<1>(lane_butterfly<2>(x))",
        HADAMARD,
    ),
    Mutant(
        "signs before the factor of an inverse",
        "kLast && kTurn == Turn::kInverse",
        "kFirst && kTurn == Turn::kInverse",
        HADAMARD,
    ),
    Mutant(
        "caller's CPU flags apply",
        "const FloatStateGuard guard;",
        "",
        ("test_pool.py",),
    ),
    Mutant(
        "shares of threads leave a rest",
        "begin + base + (share < rest ? 1 : 0)",
        "begin + base",
        ("test_pool.py",),
    ),
    Mutant(
        "a fork keeps the parent's pool",
        "current.store(nullptr);",
        "",
        ("test_pool.py",),
    ),
]


def holders(root: Path, text: str) -> list[Path]:
    """Sources below ``root``/csrc that hold ``text``, once for each time they do."""
    sources = sorted((root / "csrc").rglob("*.[hc]*"))
    return [path for path in sources for _ in range(path.read_text().count(text))]


class Tree:
    """The copy: configured once, rebuilt after each change."""

    def __init__(self, root: Path, *, baseline: bool) -> None:
        self.root = root
        ignored = shutil.ignore_patterns("*.so", "__pycache__", ".*")
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name, ignore=ignored)
            else:
                shutil.copy(ROOT / name, root / name)
        self._replace("CMakeLists.txt", "-O3", "-O1")
        if baseline:
            self._leave_baseline()
        self._configure()

    def _replace(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        path.write_text(path.read_text().replace(old, new))

    def _leave_baseline(self) -> None:
        self._replace("CMakeLists.txt", "baseline avx2 avx512", "baseline")
        for name in ("isa_select.cpp", "tables.h"):
            self._replace(f"csrc/cpu/{name}", "#if defined(__x86_64__)", "#if 0")

    def _configure(self) -> None:
        import pybind11

        self._run(
            *("cmake", "-G", "Ninja", "-S", ".", "-B", "build"),
            *("-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1"),
            *("-DCOMMKERN_INPLACE=ON", "-DCOMMKERN_CUDA=OFF"),
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DPython_EXECUTABLE={sys.executable}",
        )
        self.build()

    def _run(self, *command: str) -> subprocess.CompletedProcess[str]:
        beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            command,
            check=False,
            cwd=self.root,
            env=os.environ | {"PATH": beside, "PYTHONPATH": "python"},
            capture_output=True,
            text=True,
        )
        if done.returncode and command[0] != sys.executable:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done

    def build(self) -> None:
        self._run("cmake", "--build", "build", "-j", str(os.cpu_count() or 1))

    def failing_test(self, tests: tuple[str, ...]) -> str | None:
        """The first test that fails, None where all pass."""
        options = ["-x", "-q", "--tb=no", "-rf", "-p", "no:cacheprovider"]
        paths = [f"tests/kernels/{name}" for name in tests]
        done = self._run(
            sys.executable, "-m", "pytest", *options, "-k", "not reference", *paths
        )
        if done.returncode == 0:
            return None
        failed = [x for x in done.stdout.splitlines() if x.startswith("FAILED ")]
        if failed:
            return failed[0].split(" ")[1].removeprefix("tests/kernels/")
        if done.returncode < 0:
            return f"died of signal {-done.returncode}"
        raise SystemExit(f"the suite did not run:\n{done.stdout}{done.stderr}")


def try_mutant(tree: Tree, mutant: Mutant) -> tuple[str, bool]:
    """(what caught it, whether something did)."""
    found = holders(tree.root, mutant.old)
    if len(found) != 1:
        return f"TEXT FOUND {len(found)} TIMES", False
    path = found[0]
    original = path.read_text()
    path.write_text(original.replace(mutant.old, mutant.new))
    try:
        tree.build()
        caught = tree.failing_test(mutant.tests)
    finally:
        path.write_text(original)
    return caught or "SURVIVED", caught is not None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name holds this")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument(
        "--baseline", action="store_true", help="one instruction set alone"
    )
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.only in mutant.name]
    if arguments.list or not chosen:
        print("\n".join(mutant.name for mutant in MUTANTS))
        return 0 if arguments.list else 1
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), baseline=arguments.baseline)
        healthy = tree.failing_test(tuple({t for m in chosen for t in m.tests}))
        if healthy is not None:
            raise SystemExit(f"the unchanged tree fails {healthy}")
        width = max(len(mutant.name) for mutant in chosen)
        print(f"{'mutant':{width}}  seconds  caught by", flush=True)
        all_caught = True
        for mutant in chosen:
            started = time.monotonic()
            verdict, caught = try_mutant(tree, mutant)
            all_caught &= caught
            seconds = time.monotonic() - started
            print(f"{mutant.name:{width}}  {seconds:7.1f}  {verdict}", flush=True)
    return 0 if all_caught else 1


if __name__ == "__main__":
    sys.exit(main())
