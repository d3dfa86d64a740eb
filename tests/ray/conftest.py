from tests.support.loop import pytest_pyfunc_call as pytest_pyfunc_call
