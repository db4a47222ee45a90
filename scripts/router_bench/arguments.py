"""Options of the scripts that judge routers on texts."""

import argparse
from pathlib import Path

from tokenrouter.evaluation.bench import add_data_dir, add_json, check_json

from .setup import LOCAL_TEXTS, TEXTS

WITHOUT_DATA = ("python_docs",)


def add_text_options(parser: argparse.ArgumentParser, windows: int) -> None:
    """Which texts, how much of them, which trained routers, and ``--json``; ``windows``: the default number."""
    parser.add_argument("--windows", type=int, help=f"of each text (default: {windows})")
    parser.add_argument(
        "--texts", nargs="+", choices=TEXTS, help=f"default: {' '.join(LOCAL_TEXTS)}"
    )
    add_data_dir(parser)
    parser.add_argument(
        "--routers",
        type=Path,
        metavar="FOLDER",
        help="of trained routers, such as *_mlp.json (default: those that come with the package)",
    )
    add_json(parser)


def check_text_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the script where one of them is out of its range; sets ``args.texts`` where none was given."""
    if args.texts is None:
        args.texts = LOCAL_TEXTS if args.data_dir else WITHOUT_DATA
    if len(set(args.texts)) < len(args.texts):
        parser.error(f"--texts names a text twice: {' '.join(args.texts)}")
    if args.windows is not None and args.windows < 2:
        parser.error(
            f"--windows must be at least 2, since intervals are over windows, got {args.windows}"
        )
    if args.routers is not None and not args.routers.is_dir():
        parser.error(f"--routers {args.routers}: there is no such folder")
    check_json(parser, args)
