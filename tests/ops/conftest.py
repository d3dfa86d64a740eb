import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Without the tests' own type checker, as a user runs it."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
