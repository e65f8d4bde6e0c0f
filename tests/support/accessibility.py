"""What axe finds wrong on a page."""

from axe_playwright_python.sync_playwright import Axe

OPTIONS = {"resultTypes": ["violations"]}  # what is in order need not be described


def violations(page, part=None):
    """On the page, or in the part of it that axe's context names: each with its id and impact."""
    return Axe().run(page, context=part, options=OPTIONS).response["violations"]
