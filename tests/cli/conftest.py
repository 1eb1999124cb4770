"""The app over loopback, as the tests of the server have it."""

from __future__ import annotations

from tests.server.conftest import on_port  # noqa: F401 - a fixture
