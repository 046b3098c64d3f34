import pytest

pytest.register_assert_rewrite("tests.runtimes.contract", "tests.runtimes.thread_contract")
