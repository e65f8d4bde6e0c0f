"""Korean particles that do not fit the sound before them: 식 (7.1)를, 그림 2가 is right.

Which of 은/는, 이/가, 을/를, 과/와, 으로/로 follows depends on whether the sound before ends in a
consonant. Checked is what an editor cannot see at a glance: a particle after a number, a formula, a
title in brackets, a link or an emphasis, where the last sound is known.
"""

import re

CONSONANT, VOWEL, RIEUL = "consonant", "vowel", "ㄹ"
PARTICLES = {"은": CONSONANT, "는": VOWEL, "이": CONSONANT, "가": VOWEL, "을": CONSONANT}
PARTICLES |= {"를": VOWEL, "과": CONSONANT, "와": VOWEL}
READ = dict(zip("0123456789", "영일이삼사오육칠팔구", strict=True)) | {
    "l": "엘", "m": "엠", "n": "엔", "r": "알", "L": "엘", "M": "엠", "N": "엔", "R": "알",
}  # fmt: skip
LETTERS = "abcdefghijkopqstuvwxyzABCDEFGHIJKOPQSTUVWXYZ"  # their names end in a vowel
CLOSED = r"[*`」\]’”}]+(?:\([^()]*\))?"
PATTERN = re.compile(
    rf"(?:(?P<sound>[가-힣0-9])(?:\([A-Za-z][^()]*\))?(?:{CLOSED}|(?<=\)))"
    # Not the number of a name, such as Llama 3's, nor a fraction, whose numerator is read last.
    r"|(?<![0-9A-Za-z/.-])(?<![A-Za-z] )[0-9.]*(?P<digit>[0-9])|\([0-9.]*(?P<equation>[0-9])\)"
    r"|\$[0-9.]*(?P<letter>[0-9A-Za-z])\$)"
    r"(?P<particle>은|는|이|가|을|를|과|와|으로|로)(?=[\s.,:;!?)]|$)"
)


def ending(character):
    """The last sound of a syllable, of a digit, or of a letter's name."""
    if character in LETTERS:
        return VOWEL
    final = (ord(READ.get(character, character)) - ord("가")) % 28
    return RIEUL if final == 8 else CONSONANT if final else VOWEL


def misfits(text):
    """The places in a text where a particle does not fit, with some words around."""
    found = []
    for match in PATTERN.finditer(text):
        last = ending(match["sound"] or match["digit"] or match["equation"] or match["letter"])
        particle = match["particle"]
        if particle in PARTICLES:
            fits = PARTICLES[particle] == (CONSONANT if last == RIEUL else last)
        else:
            fits = (particle == "으로") == (last == CONSONANT)
        if not fits:
            found.append(text[max(0, match.start() - 20) : match.end() + 5])
    return found
