"""Tests that are coroutines: a conftest that imports `pytest_pyfunc_call` runs each on an event loop of its own."""

import asyncio
import inspect

import pytest

__all__ = ["pytest_pyfunc_call"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
