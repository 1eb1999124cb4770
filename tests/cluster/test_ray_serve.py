"""The application of Ray Serve: its arguments, and the app whose lifespan has the model."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from luceasync.cluster.ray_serve import RayServeSettings, app_builder, settings_of
from luceasync.errors import ConfigError


def test_arguments_are_text_as_serve_run_gives_them_or_values_of_yaml() -> None:
    expected = RayServeSettings(config="/etc/l.toml", max_replicas=4, num_gpus=0.5)
    assert (
        settings_of({"config": "/etc/l.toml", "max_replicas": "4", "num_gpus": "0.5"}) == expected
    )
    values = {"config": "/etc/l.toml", "max_replicas": 4, "num_gpus": 0.5}
    assert settings_of(values) == expected
    assert settings_of({name: str(value) for name, value in values.items()}) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"junk": "1"}, "junk: unknown argument; allowed: config, drain_s"),
        ({"max_replicas": "many"}, "max_replicas: 'many'; an integer is expected"),
        ({"num_gpus": "nan"}, "num_gpus: 'nan'; a number is expected"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas: 2; at least 3 is expected"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(arguments)
    assert words in str(refused.value)


@pytest.mark.slow  # loads the bundled model
def test_a_replica_s_app_answers_from_its_lifespan_s_begin_on() -> None:
    app = app_builder(RayServeSettings())()
    with TestClient(app, base_url="http://localhost") as client:
        assert client.get("/ready").json()["ready"] is True
        body = {"messages": [{"role": "user", "content": "What is a list?"}], "max_tokens": 2}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 2
