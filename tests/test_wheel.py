"""Files that hatch puts into the wheel: a server started from them has its page."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Copies of the wheel's files, as an installation would have them. Nothing is compiled."""
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling: pip install 'verax[test-all]'")
    folder = tmp_path_factory.mktemp("wheel")
    for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files():
        target = folder / file.distribution_path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.path, target)
    return folder


def test_a_server_from_the_wheel_finds_the_files_of_its_page(unpacked):
    code = (
        "import json; from verax.serve.page import page; print(json.dumps([page.__file__, [*page.static_files()[1]]]))"
    )
    environment = {"PYTHONPATH": str(unpacked)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    module, found = json.loads(done.stdout)
    assert Path(module).is_relative_to(unpacked)
    static = ROOT / "src/verax/serve/page/static"
    assert sorted(found) == sorted(path.name for path in static.iterdir())
    for name in found:
        assert (unpacked / "verax/serve/page/static" / name).read_bytes() == (static / name).read_bytes()


def test_the_wheel_has_every_module(unpacked):
    modules = {path.relative_to(ROOT / "src") for path in (ROOT / "src/verax").rglob("*.py")}
    assert modules - {path.relative_to(unpacked) for path in unpacked.rglob("*.py")} == set()
