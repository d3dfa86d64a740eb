"""Compile the native library with the machine's C++ compiler: `python -m verax.ops.cpu.build`.

The package's build hook runs this file by its path, in an environment that has neither verax nor JAX: it imports the
standard library only, and looks for XLA's headers in whatever jaxlib is there.

Which jaxlib's headers: a library runs under the jaxlib that it was compiled against and under newer ones, not under
older ones. So the hook requires the oldest that verax supports (`HEADERS`), and one build serves all.

A compiled object is kept in `$VERAX_CACHE_DIR/build` (by default `~/.cache/verax/build`; none if the variable is empty)
under the hash of everything that it is made of: compiler, flags, source and included headers. A second environment, a
second clone, a further level or a change of one kernel compiles what differs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HEADERS = "jaxlib>=0.10,<0.11; python_version < '3.15'", "jaxlib>=0.10; python_version >= '3.15'"
"""Requirements that bring XLA's FFI headers, for the build hook. (Python 3.14 is the newest with a jaxlib 0.10.)"""

SOURCES = Path(__file__).with_name("native")

LEVEL_ROW = re.compile(r'ROW\((\w+), (\w+),((?:[\s\\]*"[^"]*")+)')
"""Pattern of a level in native/levels.h: its name, its architecture (`any` for all) and its compiler flags."""

HERE = "here"
"""Name for all levels that this machine runs."""

BEST = "best"
"""Name for the best level that this machine runs, alone: all that one who runs models here needs."""

LONG = "linear_blocks", "linear", "gemm", "gemm_panels"
"""Kernels that take longest to compile. They begin first, so that no core waits for one of them at the end."""

COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-schedule-insns",
    "-Wall",
    "-Wextra",
    "-Werror=vla",
)
"""Flags of every compiler call. On ARM, GCC's scheduling before it assigns registers moves loads up until sums of the
inner loops no longer fit into the registers; on x86 it is off, and clang has none."""

EMULATE_AMX = "-DVERAX_EMULATE_AMX"
"""Flag of the level amx, in place of the compiler's own, where its tiles are emulated (kernels/emulated_amx.h)."""

CACHE_BYTES = 768 << 20
"""Size of the cache of objects above which the least recently used are removed: every level with sanitisers, twice."""

STALE_SECONDS = 3600
"""Age from which an unfinished object in the cache is of a build that was interrupted."""

INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^">]+)[">]', re.MULTILINE)
"""Pattern of a header that a source includes."""

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


def include_flags(generated: Path, *, ffi: bool) -> list[str]:
    """Compiler flags that name the folders of headers: of the kernels, generated, and, if `ffi`, of XLA."""
    return ["-I", str(SOURCES), "-I", str(generated), *(("-isystem", str(headers())) if ffi else ())]


def build(
    target: Path | None,
    *,
    flags: Sequence[str] = (),
    programs: Sequence[Path] = (),
    levels: Sequence[str] = (),
    emulate_amx: bool = False,
) -> list[str]:
    """Compile the library into `target`, replacing it only when all went well.

    Args:
        target: the library's path; with `programs`, a folder for them; None to compile the kernels into the cache only,
            which needs no headers of XLA and so can run while jaxlib is still being downloaded.
        flags: more of them for every compiler call, such as `-fsanitize=address`.
        programs: C++ files with a `main` that call kernels: makes an executable of each, without FFI handlers.
        levels: names of the levels to compile in addition to the portable one, or `HERE`; `BEST` leaves the portable
            one out; every level of the architecture if empty.
        emulate_amx: compile the level amx with emulated tiles, which any machine with AVX512-BF16 runs. Programs whose
            `levels` name amx get them on a machine without AMX, too.

    Returns:
        The levels that it holds. A level whose flags the compiler does not know is left out.

    Raises:
        BuildError: if a compiler or XLA's headers are missing, or the compiler fails.
    """
    if platform.system() not in ("Linux", "Darwin"):
        raise BuildError(f"{platform.system()} is not supported: Linux and macOS are")
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler was found (c++, g++, clang++, or $CXX)")
    with tempfile.TemporaryDirectory(prefix="verax-build-") as name:
        folder = Path(name)
        taken = _levels(cxx, levels, folder, emulate_amx=emulate_amx, tests=bool(programs))
        emulation = [EMULATE_AMX] if EMULATE_AMX in taken.get("amx", ()) else []
        ffi = target is not None and not programs
        more = [*flags, *(f"-DVERAX_HAS_{level}={int(level in taken)}" for level in level_flags())]
        handlers = folder / "handlers.cc"  # as one unit: XLA's templates take longer than ours
        handlers.write_text("".join(f'#include "{source.name}"\n' for source in sorted(SOURCES.glob("*_ffi.cc"))))
        units: dict[str, tuple[Path, list[str]]] = {"handlers.o": (handlers, [])} if ffi else {}
        units["levels.o"] = SOURCES / "levels.cc", emulation
        for source in sorted((SOURCES / "kernels").glob("*.cc"), key=lambda source: (source.stem not in LONG, source)):
            for level, options in taken.items():
                units[f"{source.stem}-{level}.o"] = source, [f"-DVERAX_LEVEL={level}", *options]
        mains = {f"{program.stem}.o": (program, list[str]()) for program in programs}
        write_generated_headers(folder)
        objects = _Objects(cxx, include_flags(folder, ffi=ffi), folder)

        def compile_unit(unit: tuple[str, tuple[Path, list[str]]]) -> str:
            name, (source, options) = unit
            return str(objects.compile(source, [*COMMON, *options, *more], folder / name))

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            linked = list(pool.map(compile_unit, {**units, **mains}.items()))
        objects.trim()
        if target is None:
            return list(taken)
        link = [*cxx, *flags, "-pthread", *linked[: len(units)]]
        for program, main_object in zip(programs, linked[len(units) :], strict=True):
            _link([*link, main_object], target / program.stem)
        if not programs:
            _link([*link, "-shared"], target)
    return list(taken)


def _levels(
    cxx: list[str], levels: Sequence[str], folder: Path, *, emulate_amx: bool, tests: bool
) -> dict[str, list[str]]:
    """Flags of each level to compile, best first, as `build` takes its arguments."""
    every = level_flags()
    if unknown := sorted({*levels} - {*every, HERE, BEST}):
        names = f"{', '.join(every)}, {HERE} and {BEST}"
        raise BuildError(f"unknown level {', '.join(unknown)}; the levels are {names}")
    here = architecture(cxx)
    native = {level: options for level, (where, options) in every.items() if where in ("any", here)}
    taken = {level: options for level, options in native.items() if _compiles(cxx, options, folder)}
    lacks_amx = tests and "amx" in levels and "amx" in native and "amx" not in _levels_here(cxx, taken, folder)
    if emulate_amx or lacks_amx:
        options = [flag for flag in native["amx"] if not flag.startswith("-mamx")]
        taken = {"amx": [*options, EMULATE_AMX], **{level: taken[level] for level in taken if level != "amx"}}
    if levels:
        runnable = _levels_here(cxx, taken, folder) if {HERE, BEST} & {*levels} else []
        wanted = {*levels, *(runnable if HERE in levels else runnable[:1])}
        portable = BEST not in levels
        taken = {level: taken[level] for level in taken if level in wanted or (portable and every[level][0] == "any")}
    return taken


class _Objects:
    """Compiles sources into objects, and keeps these in a cache.

    An object enters the cache complete, by a rename, so an interrupted build leaves at most a temporary file; one that
    is taken out is linked (or copied) into the build's own folder first, so no other build can remove it in between.
    """

    def __init__(self, cxx: list[str], includes: list[str], folder: Path):
        self.cxx, self.includes, self.folder = cxx, includes, folder
        home = os.environ.get("VERAX_CACHE_DIR", "~/.cache/verax")
        self.cache = Path(home).expanduser() / "build" if home else None
        version = subprocess.run([*cxx, "--version"], capture_output=True, text=True, check=False).stdout
        self.compiler = f"{shutil.which(cxx[0])} {' '.join(cxx[1:])} {architecture(cxx)} {version}"
        self.include_folders = [Path(flag) for flag in includes if not flag.startswith("-")]
        self._read = functools.cache(Path.read_bytes)

    def compile(self, source: Path, flags: Sequence[str], target: Path) -> Path:
        """Compile a source into `target`, or take it out of the cache."""
        command = [*self.cxx, *flags, *self.includes, "-c", str(source), "-o"]
        # What "native" means differs between machines, which may share a cache.
        if self.cache is None or any("=native" in flag for flag in flags):
            _run([*command, str(target)])
            return target
        kept = self.cache / f"{self._key(source, flags)}.o"
        with _lock(kept.with_suffix(".lock")):  # another build may be compiling it
            try:
                os.utime(kept)  # used now, which `trim` goes by
                _link_or_copy(kept, target)
            except OSError:
                _run([*command, str(target)])
                self._keep(target, kept)
        return target

    def trim(self) -> None:
        """Remove unfinished objects, and the least recently used ones above `CACHE_BYTES`."""
        if self.cache is None:
            return
        size, now = 0, time.time()
        kept = list[tuple[os.stat_result, Path]]()
        for path in self.cache.glob("*") if self.cache.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):  # a lock of another build, or what that one trimmed
                kept.append((path.stat(), path))
        for status, path in sorted(kept, key=lambda entry: entry[0].st_mtime, reverse=True):
            size += status.st_size
            unfinished = path.suffix != ".o" and now - status.st_mtime > STALE_SECONDS  # locks too
            if unfinished or size > CACHE_BYTES:
                path.unlink(missing_ok=True)

    def _key(self, source: Path, flags: Sequence[str]) -> str:
        """Hash of what an object is made of. Paths are not part of it: another clone has the same objects."""
        digest = hashlib.sha256(repr((self.compiler, list(flags))).encode())
        seen, waiting = {source}, [source]
        while waiting:  # the source, and all headers that it includes but for the system's
            path = waiting.pop(0)
            text = self._read(path)
            digest.update(hashlib.sha256(text).digest())
            for name in INCLUDE.findall(text.decode(errors="replace")):
                candidates = (folder / name for folder in (path.parent, *self.include_folders))
                header = next((header.resolve() for header in candidates if header.is_file()), None)
                if header is not None and header not in seen:
                    seen.add(header)
                    waiting.append(header)
        return digest.hexdigest()

    def _keep(self, compiled: Path, kept: Path) -> None:
        unfinished = kept.with_name(f"{kept.stem}.{os.getpid()}.unfinished")
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(compiled, unfinished)
            os.replace(unfinished, kept)
        except OSError:  # a folder that cannot be written, a full disk: the build needs no cache
            with contextlib.suppress(OSError):
                unfinished.unlink()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file among processes; none in a folder that cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # who waits for it has it open, and finds the object


def _link_or_copy(kept: Path, target: Path) -> None:
    try:
        os.link(kept, target)
    except OSError:  # another file system
        shutil.copyfile(kept, target)


def _link(command: list[str], target: Path) -> None:
    # Next to the target, so that replacing it is one step: a process that has the old library keeps its file.
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
    """Levels out of the given ones that this machine runs, best first; all if a compiled program does not run here."""
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
    parser.add_argument("--cache-only", action="store_true", help="compile the kernels into the cache only")
    parser.add_argument("--flags", default="", help="more compiler flags, as one argument")
    parser.add_argument(
        "--levels",
        nargs="+",
        default=[],
        help=f"compile these levels and the portable one; {HERE}: all that this machine runs; {BEST}: its best alone",
    )
    parser.add_argument("--emulate-amx", action="store_true", help="emulate the tiles of the level amx")
    parser.add_argument("--programs", type=Path, nargs="+", default=[], help="make executables of these C++ files")
    options = parser.parse_args()
    try:
        levels = build(
            None if options.cache_only else options.target,
            flags=shlex.split(options.flags),
            programs=options.programs,
            levels=options.levels,
            emulate_amx=options.emulate_amx,
        )
    except BuildError as error:
        sys.stderr.write(f"verax: the native library was not built: {error}\n")
        return 1
    sys.stdout.write(f"{'cache' if options.cache_only else options.target}: {', '.join(levels)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
