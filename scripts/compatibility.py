"""Writes docs/compatibility.md: which features work together, from what tests/compatibility declares and checks.

python scripts/compatibility.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.compatibility import document

    page = ROOT / "docs" / "compatibility.md"
    page.write_text(document.text(), encoding="utf-8")
    print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
