"""A training from the command line: ``torchrun -m nxdpp.nnscaler.cli.train -f train.yaml [--name VALUE ...]``."""

from nxdpp.nnscaler import uninit
from nxdpp.nnscaler.cli import Trainer


def main() -> None:
    """Train with the arguments of the command line; collective over all ranks."""
    try:
        Trainer().run()
    finally:
        uninit()


if __name__ == "__main__":
    main()
