"""Show a chapter's outputs in another language than that of the code.

A notebook is executed once, and its outputs are English. ``book/CODE/outputs/CHAPTER.yml``, and
``common.yml`` where that has no entry, say what the page in another language shows instead: for the
claims that ``naranhi.check`` prints, for headings and cells of tables, for the text in figures and
for their descriptions. In these files

    {}     stands for a number, with its unit if it has one
    {*}    stands for anything, where no entry without it fits
    null   leaves a text as it is

The translation has the same places, in the same order or numbered: {0}, {1}. A description that has
no entry as a whole is taken apart: into sentences, and those into clauses. What a program prints
besides, its errors and its source stay English.
"""

import html
import re
from pathlib import Path

import yaml
from alone import CannotBuild

UNIT = r"(?: (?:[nµm]?s|[KMGT]?i?B|[kMGTP]?(?:B|bit|FLOP)/s)(?![\w/]))?"
DIGITS = rf"[-−]?(?:\d[\d,]*\d|\d)(?:\.\d+)?(?:e-?\d+)?{UNIT}"
# Not the digits of a name: GPT-2, fp32, 1F1B.
NUMBER = re.compile(rf"(?<![\w.])(?<!\w-){DIGITS}(?=x\b|\W|$)")
PLACE = re.compile(r"\{(\d*|\*)\}")
CLAIM = re.compile(r"((?:\[.*?\] )?✓ )(.*?)(?: \(((?:within [^()]*?)??(?:, )?(?:measured)?)\))?")
MISSED = re.compile(r"((?:\[.*?\] )?✗ )(.*) (\(measured: [^()]*\))")
ELEMENT = re.compile(r"(<(th|td|caption|text|label)\b[^>]*>)([^<]+)(?=</\2>)")
PRINTED = re.compile(r"(?<=<pre>)[^<]*(?=</pre>)")  # of a record; a cell's has no elements
DESCRIPTION = re.compile(r'(?<= aria-label=")[^"]+')


class Catalogue:
    """What the texts of outputs are in one language.

    Args:
        entries: {English: what it is in the language, or None where it stays as it is}.

    Attributes:
        missing: the texts that were asked for in vain, with places for numbers.
        used: the entries that have served.
    """

    def __init__(self, entries: dict[str, str | None]):
        self.entries = entries
        self.missing: set[str] = set()
        self.used: set[str] = set()
        self._patterns = {
            re.compile("".join(_pattern(part) for part in re.split(r"(\{\*?\})", key))): key
            for key in entries
            if "{*}" in key
        }

    def say(self, text: str, required: bool = True) -> str:
        """A text in the language; as it is if it has no entry, which is noted if it is required."""
        said = self._find(text)
        if said is None and required and re.search(r"[A-Za-z]{2}", template(text)[0]):
            self.missing.add(template(text)[0])
        return text if said is None else said

    def describe(self, text: str) -> str:
        """A description of one or more sentences."""
        sentences = re.split(r"(?<=[.!?]) ", text)
        return self._find(text) or " ".join(self._sentence(sentence) for sentence in sentences)

    def _sentence(self, text):
        clauses = re.split(r"(?<=[:;]) ", text)
        if len(clauses) == 1 or template(text)[0] in self.entries:
            return self.say(text)
        said = [self._find(clause) for clause in clauses]
        return self.say(text) if None in said else " ".join(said)

    def _find(self, text):
        key, numbers = template(text)
        if key not in self.entries:
            fits = ((key, pattern.fullmatch(text)) for pattern, key in self._patterns.items())
            key, match = next(((key, match) for key, match in fits if match), (None, None))
            if match is None:
                return None
            numbers = match.groups()
        self.used.add(key)
        said, rest = self.entries[key], iter(numbers)
        if said is None:
            return text
        return PLACE.sub(lambda at: numbers[int(at[1])] if at[1].isdigit() else next(rest), said)


def _pattern(part):
    return {"{*}": "(.*)", "{}": f"({DIGITS})"}.get(part) or re.escape(part)


def template(text: str) -> tuple[str, list[str]]:
    """A text with places for its numbers, and the numbers."""
    return NUMBER.sub("{}", text), NUMBER.findall(text)


def load(language: str, root: Path, chapter: str) -> Catalogue | None:
    """The catalogue of a chapter in a language, or None if the language has none.

    Raises:
        CannotBuild: a translation has other places than the original, or what `read` raises.
    """
    folder = root / "book" / language / "outputs"
    if not folder.exists():
        return None
    entries = {}
    for path in (folder / "common.yml", folder / f"{chapter}.yml"):
        for key, said in read(path).items():
            if said is not None and not _fits(PLACE.findall(said), len(PLACE.findall(key))):
                raise CannotBuild(
                    f"{path}: {key!r} and {said!r} differ in the number of {{}}; those with a "
                    "number begin with {0}, and each is there once"
                )
            entries[key] = said
    return Catalogue(entries)


def _fits(places, number):
    """Whether the places of a translation take all numbers of the original, each once."""
    if not any(map(str.isdigit, places)):
        return len(places) == number
    return sorted(places) == sorted(map(str, range(number)))


def read(path: Path) -> dict[str, str | None]:
    """The entries of a file, none if there is no such file.

    Raises:
        CannotBuild: it is not YAML, or an entry is not text.
    """
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CannotBuild(f"{path} is not YAML: {error}") from None
    if entries is None:  # nothing but comments, as a new file has
        return {}
    if not isinstance(entries, dict):
        raise CannotBuild(f'{path}: entries are written "TEXT": "TRANSLATION"')
    for key, said in entries.items():
        if not isinstance(key, str) or not isinstance(said, str | None):
            # YAML takes yes and no for bools, 2.5 for a number.
            raise CannotBuild(f"{path}: {key!r}: {said!r} is not text for YAML; write it in quotes")
    return entries


def outputs(cells, catalogue: Catalogue) -> None:
    """Change the outputs of code cells to the catalogue's language."""
    for output in (output for cell in cells for output in cell.outputs):
        if output.output_type == "stream" and output.name == "stdout":
            output.text = claims(output.text, catalogue)
        elif "text/html" in output.get("data", {}):
            output.data["text/html"] = page(output.data["text/html"], catalogue)


def claims(text: str, catalogue: Catalogue) -> str:
    """Change the claims in a printed text to the catalogue's language."""
    return "\n".join(_claim(line, catalogue) for line in text.split("\n"))


def _claim(line, catalogue):
    if match := MISSED.fullmatch(line):
        return _missed(*match.groups(), catalogue)
    match = CLAIM.fullmatch(line)
    if not match:
        return line
    start, claim, notes = match.groups()
    said = [catalogue.say(f"({note})")[1:-1] for note in (notes or "").split(", ") if note]
    return start + catalogue.say(claim) + (f" ({', '.join(said)})" if said else "")


def _missed(start, text, note, catalogue):
    """A claim that was false, with what was measured instead; a colon may also be in the claim."""
    for colon in reversed([*re.finditer(": ", text)]):
        claim = catalogue.say(text[: colon.start()], required=False)
        if claim != text[: colon.start()]:
            why = catalogue.say(text[colon.end() :], required=False)
            return f"{start}{claim}: {why} {catalogue.say(note)}"
    return f"{start}{text} {note}"


def page(text: str, catalogue: Catalogue) -> str:
    """Change words in HTML to the catalogue's language: of tables, figures, and printed claims."""

    def element(match):
        text = html.unescape(match[3])
        said = catalogue.say(text.strip(), required=match[2] != "td")
        return match[1] + html.escape(text.replace(text.strip(), said), quote=False)

    def description(match):
        return html.escape(catalogue.describe(html.unescape(match[0])))

    def printed(match):
        return html.escape(claims(html.unescape(match[0]), catalogue), quote=False)

    text = PRINTED.sub(printed, text)
    return DESCRIPTION.sub(description, ELEMENT.sub(element, text))
