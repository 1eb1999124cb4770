"""A command gets the Config made from its flags, the environment and the file."""

from __future__ import annotations

import logging

import pytest
import typer
from typer.testing import CliRunner

from luceasync.cli.flags import with_config
from luceasync.config import Config


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @with_config("model", "engine", "server")
    def show(config: Config, loud: bool = False) -> None:
        """Show it."""
        typer.echo(f"{config.model.model_dir} {config.engine.parallel} {loud}")
        typer.echo(f"{config.server.port} {config.server.api_keys} {config.placement.devices}")

    return app


def test_a_command_may_have_flags_of_its_own(app):
    arguments = ["/m", "--parallel", "2", "--loud", "--api-key", "a", "--api-key", "b"]
    result = CliRunner().invoke(app, arguments)
    assert result.output == "/m 2 True\n8000 ('a', 'b') ()\n"


def test_file_and_environment_set_options_without_a_flag(app, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[server]\nport = 9\n[engine]\nparallel = 3\n")
    environ = {"LUCEASYNC_TARGET_DEVICES": "cpu", "LUCEASYNC_CONFIG": str(path)}
    result = CliRunner().invoke(app, ["/m"], env=environ)
    assert result.output == "/m 3 False\n9 () ('cpu',)\n"


def test_the_config_flag_wins_over_its_variable(app, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[server]\nport = 9\n")
    result = CliRunner().invoke(
        app, ["/m", "--config", str(path)], env={"LUCEASYNC_CONFIG": "/none"}
    )
    assert result.output.endswith("9 () ()\n")


def test_a_quiet_command_leaves_warnings_to_the_server(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "luceasync")  # what the command sets ends with the test
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    keys.chmod(0o644)
    for quiet, num_warnings in ((False, 1), (True, 0)):
        app = typer.Typer()
        app.command()(with_config(quiet=quiet)(lambda config: typer.echo(config.server.api_keys)))
        caplog.clear()
        result = CliRunner().invoke(app, [], env={"LUCEASYNC_API_KEY_FILE": str(keys)})
        assert result.output == "('sesame',)\n"
        assert len(caplog.messages) == num_warnings


@pytest.mark.parametrize(("flags", "ddtree"), [([], True), (["--no-ddtree"], False)])
def test_a_switch_may_be_turned_off_by_a_flag(flags, ddtree):
    app = typer.Typer()

    @app.command()
    @with_config("draft")
    def show(config: Config) -> None:
        typer.echo(config.draft.ddtree)

    result = CliRunner().invoke(app, flags, env={"LUCEASYNC_DDTREE": "1"})
    assert result.output == f"{ddtree}\n"


def test_a_name_may_be_repeated():
    app = typer.Typer()

    @app.command()
    @with_config("model")
    def show(config: Config) -> None:
        typer.echo(config.model.names)

    result = CliRunner().invoke(app, ["--model-name", "a", "--model-name", "*"])
    assert result.output == "('a', '*')\n"
