"""Build hook: compiles the native CPU library into the package. Without a compiler the package installs without it."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "src/verax/ops/cpu"


class NativeLibrary(BuildHookInterface):
    """Adds `libverax-SYSTEM-MACHINE.so` to wheels, and to the source tree of an editable installation.

    A wheel has every level of instructions, an editable installation all that this machine runs, which the tests want.
    The environment variable `VERAX_BUILD_LEVELS` names others: `"avx512 avx2"`, with the portable level too, or `best`
    for the machine's best level alone.
    """

    def dependencies(self) -> list[str]:
        """XLA's headers, if there is a compiler to use them."""
        native = _load(self.root)
        return list(native.HEADERS) if native.compiler() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the wheel is put together."""
        if self.target_name != "wheel":
            return
        native = _load(self.root)
        editable = version == "editable"
        if editable:
            target = Path(self.root, PACKAGE, native.library_name())
        else:
            # Elsewhere than in the source tree, where an editable installation may have its own.
            self.folder = tempfile.TemporaryDirectory(prefix="verax-wheel-")
            target = Path(self.folder.name, native.library_name())
        wanted = os.environ.get("VERAX_BUILD_LEVELS", native.HERE if editable else "").split()
        try:
            levels = native.build(target, levels=wanted)
        except native.BuildError as error:
            sys.stderr.write(f"verax: installing without the native CPU kernels: {error}\n")
            return
        self.app.display_info(f"native CPU kernels: {', '.join(levels)}")
        if not editable:
            build_data["force_include"][str(target)] = f"verax/ops/cpu/{target.name}"
            build_data["pure_python"] = False
            # Any Python 3: the library uses no interface of CPython's.
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the folder in which a wheel's library was compiled."""
        if hasattr(self, "folder"):
            self.folder.cleanup()


def _load(root: str) -> Any:
    """`verax.ops.cpu.build` by its path: verax itself is not there while it is being built."""
    spec = importlib.util.spec_from_file_location("verax_native_build", Path(root, PACKAGE, "build.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
