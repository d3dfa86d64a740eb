"""Compile the native library with the machine's C++ compiler: `python -m verax.ops.cpu.build`.

The package's build hook runs this file by its path, in an environment that has neither verax nor JAX: it imports the
standard library and `verax.sampling_fields` only, and looks for XLA's headers in whatever jaxlib is there.

Which jaxlib's headers: a library runs under the jaxlib that it was compiled against and under newer ones, not under
older ones. So the hook requires the oldest that verax supports (`HEADERS`), and one build serves all.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["HEADERS", "HERE", "BuildError", "build", "compiler", "library_name"]

HEADERS = "jaxlib>=0.10,<0.11; python_version < '3.15'", "jaxlib>=0.10; python_version >= '3.15'"
"""Requirements that bring XLA's FFI headers, for the build hook. (Python 3.14 is the newest with a jaxlib 0.10.)"""

SOURCES = Path(__file__).with_name("native")

LEVEL_ROW = re.compile(r'ROW\((\w+), (\w+),((?:[\s\\]*"[^"]*")+)')
"""Pattern of a level in native/levels.h: its name, its architecture (`any` for all) and its compiler flags."""

HERE = "here"
"""Name for all levels that this machine runs."""

COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-Werror=vla")


_PRINT_LEVELS = """
#include <cstdio>
extern "C" const char* verax_level_name(int i);
int main() {
  for (int i = 0; const char* name = verax_level_name(i); ++i) std::puts(name);
}
"""


class BuildError(RuntimeError):
    """Failure to build the library; the message names what is missing, or is the compiler's."""


def architecture(cxx: Sequence[str] = ()) -> str:
    """Architecture that a compiler compiles for, or this machine's: one name for each."""
    target = subprocess.run([*cxx, "-dumpmachine"], capture_output=True, text=True, check=False).stdout if cxx else ""
    machine = target.partition("-")[0] or platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def library_name() -> str:
    """File name of the library: by system and architecture, as one source tree may be shared between machines."""
    return f"libverax-{platform.system().lower()}-{architecture()}.so"


def compiler() -> list[str] | None:
    """Command of the C++ compiler: `$CXX`, or the first of c++, g++ and clang++; None if there is none."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((shlex.split(c) for c in candidates if shutil.which(shlex.split(c)[0])), None)


def headers() -> Path:
    """Folder that holds `xla/ffi/api/ffi.h`."""
    spec = importlib.util.find_spec("jaxlib")
    for location in (spec and spec.submodule_search_locations) or ():
        if (folder := Path(location) / "include").joinpath("xla/ffi/api/ffi.h").is_file():
            return folder
    raise BuildError("XLA's FFI headers were not found: jaxlib is not installed")


def level_flags() -> dict[str, tuple[str, list[str]]]:
    """Architecture and compiler flags of each level in native/levels.h, best first."""
    rows: list[tuple[str, str, str]] = LEVEL_ROW.findall(SOURCES.joinpath("levels.h").read_text())
    return {name: (where, flags.replace("\\", " ").replace('"', " ").split()) for name, where, flags in rows}


def write_generated_headers(folder: Path) -> None:
    """Write the headers that derive from the package's tables: sample_fields.h."""
    # This file may be run by its path, without verax installed; what is imported needs the standard library only.
    source = str(Path(__file__).parents[3])
    sys.path.insert(0, source)
    try:
        from verax.sampling_fields import cpp_header
    finally:
        sys.path.remove(source)
    folder.joinpath("sample_fields.h").write_text(cpp_header())


def build(
    target: Path, *, flags: Sequence[str] = (), programs: Sequence[Path] = (), levels: Sequence[str] = ()
) -> list[str]:
    """Compile the library into `target`, replacing it only when all went well.

    Args:
        target: the library's path; with `programs`, a folder for them.
        flags: more of them for every compiler call, such as `-fsanitize=address`.
        programs: C++ files with a `main` that call kernels: makes an executable of each, without FFI handlers.
        levels: names of the levels to compile beside the one for all processors, or `HERE`; every level of the
            architecture if empty.

    Returns:
        The levels that it holds. A level whose flags the compiler does not know is left out.

    Raises:
        BuildError: if there is no compiler, no header, or the compiler fails.
    """
    if platform.system() not in ("Linux", "Darwin"):
        raise BuildError(f"{platform.system()} is not supported: Linux and macOS are")
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler was found (c++, g++, clang++, or $CXX)")
    with tempfile.TemporaryDirectory(prefix="verax-build-") as name:
        folder = Path(name)
        every = level_flags()
        if unknown := sorted({*levels} - {*every, HERE}):
            raise BuildError(f"there is no level {', '.join(unknown)}; the levels are {', '.join(every)} and {HERE}")
        taken = {
            level: options
            for level, (where, options) in every.items()
            if where in ("any", architecture(cxx)) and _compiles(cxx, options, folder)
        }
        if levels:
            wanted = {*levels, *(_levels_here(cxx, taken, folder) if HERE in levels else ())}
            taken = {level: taken[level] for level in taken if level in wanted or every[level][0] == "any"}
        command = [*cxx, *COMMON, *flags, *(f"-DVERAX_HAS_{level}={int(level in taken)}" for level in every)]
        write_generated_headers(folder)
        command += ["-I", str(SOURCES), "-I", str(folder), "-c", *(() if programs else ("-isystem", str(headers())))]
        sources = [source for source in sorted(SOURCES.glob("*.cc")) if not (programs and source.stem.endswith("_ffi"))]
        units = {folder / f"{source.stem}.o": [str(source)] for source in sources}
        for source in sorted((SOURCES / "kernels").glob("*.cc")):
            for level, options in taken.items():
                units[folder / f"{source.stem}-{level}.o"] = [f"-DVERAX_LEVEL={level}", *options, str(source)]
        mains = {folder / f"{program.stem}.o": [str(program)] for program in programs}
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, ([*command, *more, "-o", str(unit)] for unit, more in {**units, **mains}.items())))
        link = [*cxx, *flags, "-pthread", *map(str, units)]
        for main in mains:
            _link([*link, str(main)], target / main.stem)
        if not programs:
            _link([*link, "-shared"], target)
    return list(taken)


def _link(command: list[str], target: Path) -> None:
    # Beside the target, so that replacing it is one step: a process that has the old library keeps its file.
    target.parent.mkdir(parents=True, exist_ok=True)
    linked = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        _run([*command, "-o", str(linked)])
        os.replace(linked, target)
    finally:
        linked.unlink(missing_ok=True)


def _compiles(cxx: list[str], flags: Sequence[str], folder: Path) -> bool:
    """True if the compiler takes these flags."""
    source = folder / "probe.cc"
    source.write_text("int main() { return 0; }\n")
    command = [*cxx, *flags, "-Werror", "-c", str(source), "-o", str(folder / "probe.o")]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _levels_here(cxx: list[str], levels: Collection[str], folder: Path) -> list[str]:
    """Those of some levels that this machine runs; all of them if a program of the compiler does not run here."""
    source, program = folder / "here.cc", folder / "here"
    source.write_text(_PRINT_LEVELS)
    defined = [f"-DVERAX_HAS_{level}={int(level in levels)}" for level in level_flags()]
    _run([*cxx, "-std=c++17", *defined, str(source), str(SOURCES / "levels.cc"), "-o", str(program)])
    try:
        return subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):  # a compiler for other machines
        return list(levels)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines
        raise BuildError(f"{command[0]} failed: {' '.join(errors[:5]) or done.returncode}")


def main() -> int:
    """Build into the package's folder, or to a path; exit status 1 with the reason if that fails."""
    parser = argparse.ArgumentParser(description="Compile verax's native CPU library.")
    parser.add_argument("target", nargs="?", type=Path, default=Path(__file__).with_name(library_name()))
    parser.add_argument("--flags", default="", help="more compiler flags, as one argument")
    parser.add_argument(
        "--levels",
        nargs="+",
        default=[],
        help=f"compile these levels and the portable one only; {HERE!r}: this machine's",
    )
    parser.add_argument("--programs", type=Path, nargs="+", default=[], help="make executables of these C++ files")
    options = parser.parse_args()
    try:
        levels = build(
            options.target, flags=shlex.split(options.flags), programs=options.programs, levels=options.levels
        )
    except BuildError as error:
        sys.stderr.write(f"verax: the native library was not built: {error}\n")
        return 1
    sys.stdout.write(f"{options.target}: {', '.join(levels)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
