"""An application of Ray Serve whose replicas are servers, for clusters that run Serve already.

    serve run luceasync.cluster.ray_serve:build config=/etc/luceasync.toml max_replicas=4 num_gpus=1

Each replica is the ASGI app of `luceasync serve` in a process of Serve. Serve balances without
knowing prefixes, and each token passes its proxy: docs/results/cluster.md has what it costs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from luceasync import parsers
from luceasync.errors import ConfigError
from luceasync.ipc.ray_launcher import import_ray
from luceasync.options import load_config

CHECK_S = 10.0
# How a value is read, and what is expected of it.
READS: dict[type, tuple[Callable[[object], Any], str]] = {
    int: (parsers.integer(0), "an integer"),
    float: (parsers.number, "a number"),
    str: (parsers.text, "text"),
}


@dataclass(frozen=True, slots=True)
class RayServeSettings:
    """Arguments of `serve run`. `config`: a file as docs/luceasync.toml, on every machine;
    `ongoing`: requests a replica, beyond which Serve adds one.
    """

    config: str = ""
    name: str = "luceasync"
    min_replicas: int = 1
    max_replicas: int = 1
    ongoing: float = 4.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_ongoing_requests: int = 64
    drain_s: float = 60.0


def settings_of(arguments: Mapping[str, object]) -> RayServeSettings:
    """The settings in arguments of `serve run`, or `args` of Serve's YAML. Raises ConfigError."""
    known = {each.name: type(each.default) for each in fields(RayServeSettings)}
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        if name not in known:
            raise ConfigError(f"{name}: unknown argument; allowed: {', '.join(sorted(known))}")
        parse, words = READS[known[name]]
        try:
            found[name] = parse(value)
        except ValueError:
            raise ConfigError(f"{name}: {value!r}; {words} is expected") from None
    settings = RayServeSettings(**found)
    if settings.max_replicas < max(1, settings.min_replicas):
        raise ConfigError(
            f"max_replicas: {settings.max_replicas}; at least {max(1, settings.min_replicas)} "
            "is expected"
        )
    return settings


def build(arguments: Mapping[str, object]) -> Any:
    """The application, for `serve run`. Raises ConfigError."""
    settings = settings_of(arguments)
    import_ray("Ray Serve")
    from ray import serve

    deployment = serve.deployment(serve.ingress(app_builder(settings))())
    return deployment.options(
        name=settings.name,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        autoscaling_config={
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "target_ongoing_requests": settings.ongoing,
        },
        max_ongoing_requests=settings.max_ongoing_requests,
        graceful_shutdown_timeout_s=settings.drain_s,
        health_check_period_s=CHECK_S,
    ).bind()


def app_builder(settings: RayServeSettings) -> Callable[[], Starlette]:
    """What a replica calls once to have its ASGI app."""

    def app() -> Starlette:
        return served(settings)

    return app


def served(settings: RayServeSettings) -> Starlette:
    """The server's ASGI app; its lifespan loads the model, and ends with it. Raises ConfigError."""
    from luceasync.disk_cache.directory import make_usable
    from luceasync.engine.start import build_engine
    from luceasync.models.files import ModelFiles
    from luceasync.server.app import create_app

    config = load_config({}, {}, Path(settings.config) if settings.config else None)
    if config.cache.cache_dir is not None:
        make_usable(config.cache.cache_dir)
    engine = build_engine(config, model=ModelFiles(config.model.model_dir))
    app = create_app(engine, config.server, trust_cache_salt=config.cache.trust_cache_salt)
    serves = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(of: Starlette) -> AsyncIterator[None]:
        async with engine:
            await engine.load()
            async with serves(of):
                yield

    app.router.lifespan_context = lifespan
    return app
