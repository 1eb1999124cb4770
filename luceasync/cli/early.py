"""What a start can be refused for before torch is imported, which takes seconds.

Owns the order of these checks, which each part makes again. Changes nothing, but that the cache
directory is made.
"""

from __future__ import annotations

from pathlib import Path

from luceasync.config import Config
from luceasync.dflash.draft_config import read_draft_spec, refuse_without_drafter
from luceasync.errors import ModelError
from luceasync.gguf.place import gguf_at
from luceasync.models.config import read_spec
from luceasync.models.formats import format_of
from luceasync.nodefiles.usable import make_usable
from luceasync.pipeline.ranges import check_devices, check_weights, named_devices


def check_plan(config: Config) -> None:
    """Whether model, drafter and devices may be what they are said to be. Raises ConfigError."""
    placement = config.placement
    devices = named_devices(placement.device, placement.devices)
    if placement.layer_split is not None:
        check_weights(placement.layer_split, max(1, len(devices)))
    if config.draft.device is not None:
        check_devices([config.draft.device], "--draft-device")
    spec = read_spec(config.model.model_dir)
    if config.drafter_dir is None:
        refuse_without_drafter(config.draft)
    else:
        read_draft_spec(config.drafter_dir, spec)


def check_load(config: Config) -> None:
    """`check_plan`, and whether there is what only a running model needs. Raises ConfigError."""
    check_plan(config)
    path = config.model.model_dir / "tokenizer.json"
    if gguf_at(config.model.model_dir) is None and not path.exists():
        raise ModelError(f"{path} does not exist; a model directory needs its tokenizer.json.")
    for directory in (config.model.model_dir, config.drafter_dir):
        if directory is not None:
            _check_weight_files(directory)
    if config.cache.cache_dir is not None:
        make_usable(config.cache.cache_dir)


def _check_weight_files(model_dir: Path) -> None:
    """Raise ModelError where files that the weights are said to be in are not there: one that was
    stopped while it was copied, most often.
    """
    paths = format_of(model_dir).weight_files(model_dir)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError(
            f"{model_dir}: {len(missing)} of {len(paths)} weight files do not exist, "
            f"the first is {missing[0]}; expected all that its index names"
        )


def check_serve(config: Config) -> None:
    """`check_load`, and whether the certificate does and the port is free. Raises ConfigError."""
    from luceasync.server.listener import listen
    from luceasync.server.tls import tls_context

    tls_context(config.server)
    check_load(config)
    listen(config.server).close()
