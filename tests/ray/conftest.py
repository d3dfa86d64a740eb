"""Fixtures of tests that need Ray's package, but no cluster."""

import pytest


@pytest.fixture(scope="module")
def ray():
    """Ray's package."""
    return pytest.importorskip("ray", reason="needs the extra `ray`")
