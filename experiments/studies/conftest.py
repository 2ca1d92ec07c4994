"""The settings and fixtures of tests/conftest.py, for the tests beside each study."""

from conftest import nine_letters, shared_data, x64  # noqa: F401
