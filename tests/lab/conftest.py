import sys
from pathlib import Path

BOOK = Path(__file__).resolve().parents[2] / "book"
for place in (BOOK, BOOK / "_lab"):
    sys.path.insert(0, str(place))
