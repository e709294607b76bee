"""The command `dlres`: lists its subcommands, and imports only the requested one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lightning_dlres.core.errors import ConfigError

TRAINER_COMMANDS = ("fit", "validate", "test", "predict")
COMMANDS = ("demo", "plan", "store", "ps", *TRAINER_COMMANDS)

HELP = """\
usage: dlres COMMAND [options]

Train with PyTorch Lightning on the machines you happen to have.

commands:
  demo        train a small GPT on three CPU processes of different speeds; about two minutes
  plan        profile and plan without training:      dlres plan --config FILE [--cluster FILE]
  store       manage samples for the prefetch cache:  dlres store serve|put|ls|verify|keys
  ps          run parameter servers:                  dlres ps serve|status|keygen
  fit         train the model of a config file:       dlres fit --config FILE [overrides]
  validate    run its validation loop:                dlres validate --config FILE --ckpt_path CKPT
  test        run its test loop:                      dlres test --config FILE --ckpt_path CKPT
  predict     run its prediction loop:                dlres predict --config FILE --ckpt_path CKPT

options:
  -h, --help  show this text; `dlres COMMAND --help` shows the options of a command
  --version   show the version

fit, validate, test and predict are LightningCLI with this package's strategies registered.
To start: `dlres demo`, or `dlres fit --config examples/configs/hetero_pipe.yaml`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Args:
        argv: Command and options. None takes those of this process. Lightning starts ranks by
            running this process's command line again, so that line must call this function, too.
    """
    command, *options = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if command in ("-h", "--help"):
        print(HELP)
        return 0
    if command == "--version":
        from lightning_dlres.version import __version__

        print(f"dlres {__version__}")
        return 0
    if command not in COMMANDS:
        print(
            f"dlres: the command must be one of {', '.join(COMMANDS)}, got {command!r}. "
            "Use `dlres --help`.",
            file=sys.stderr,
        )
        return 2
    try:
        if command == "demo":
            from lightning_dlres.cli.demo import demo

            return demo(options)
        if command == "plan":
            from lightning_dlres.cli.plan import plan

            return plan(options)
        if command == "store":
            from lightning_dlres.cli.store import store

            return store(options)
        if command == "ps":
            from lightning_dlres.cli.parameter_server import parameter_server

            return parameter_server(options)
        from lightning_dlres.cli.fit import run_trainer

        return run_trainer(command, options)
    except ConfigError as error:
        # Usually all ranks raise the same error; print it once. If only another rank raises one,
        # the strategy reports it.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"dlres: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
