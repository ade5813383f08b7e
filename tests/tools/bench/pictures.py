"""What a test reads in an SVG picture."""

from __future__ import annotations

from xml.etree import ElementTree

NAMESPACE = "{http://www.w3.org/2000/svg}"


def texts_in(picture: str) -> list[str]:
    """Returns all texts of a picture; one that is not well-formed raises."""
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{NAMESPACE}text")]


def heights_in(picture: str, color: str) -> list[float]:
    """Returns the y coordinates of all markers of a colour, as they come; the first is that in the legend."""
    circles = ElementTree.fromstring(picture).iter(f"{NAMESPACE}circle")
    return [float(circle.attrib["cy"]) for circle in circles if circle.attrib["fill"] == color]
