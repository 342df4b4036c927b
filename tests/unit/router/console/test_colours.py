"""The page's colours can be read, and told apart by whoever sees fewer of them."""

import re
from itertools import combinations

import pytest

from backhaul_router.console.page_files import page_files

Colour = tuple[float, float, float]

# Linear RGB as seen without one kind of cone: Machado, Oliveira and Fernandes, "A Physiologically-based Model for
# Simulation of Color Vision Deficiency" (2009), severity 1.
VISION = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "deuteranopia": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "tritanopia": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}
TEXT = ("ink", "dim", "ok", "warn", "bad", "append", "warm")
BACKS = ("card", "page", "hover")
_STYLE = page_files()["style.css"].body.decode()


def theme(name: str) -> dict[str, Colour]:
    """Returns the colours of a theme, in linear RGB."""
    start = {"light": _STYLE.index(":root {"), "dark": _STYLE.index(':root[data-theme="dark"] {')}[name]
    block = _STYLE[start : _STYLE.index("}", start)]
    return {key: linear(value) for key, value in re.findall(r"--([a-z-]+): (#[0-9a-f]+);", block)}


def linear(text: str) -> Colour:
    """Returns a colour in linear RGB (IEC 61966-2-1)."""
    digits = text[1:] if len(text) == 7 else "".join(2 * digit for digit in text[1:])
    parts = (int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return red, green, blue


def contrast(one: Colour, other: Colour) -> float:
    """Returns the contrast of two colours, 1 to 21 (WCAG 2.2)."""
    light = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


def lab(colour: Colour) -> Colour:
    """Returns a colour in CIE L*a*b*, D65."""
    red, green, blue = (min(1.0, max(0.0, part)) for part in colour)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def seen(colour: Colour, vision: str) -> Colour:
    red, green, blue = (sum(weight * part for weight, part in zip(row, colour, strict=True)) for row in VISION[vision])
    return lab((red, green, blue))


@pytest.mark.parametrize("name", ["light", "dark"])
def test_text_has_enough_contrast(name: str) -> None:
    colours = theme(name)
    low = [(text, back) for text in TEXT for back in BACKS if contrast(colours[text], colours[back]) < 3.0]
    assert not low
    assert all(contrast(colours[text], colours[back]) >= 4.5 for text in ("ink", "dim") for back in BACKS)
    assert contrast(colours["bad"], colours["bad-back"]) >= 4.5
    assert contrast(colours["ink"], colours["bad-back"]) >= 4.5
    assert contrast(colours["ink"], colours["warn-back"]) >= 4.5


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("name", ["light", "dark"])
@pytest.mark.parametrize("group", [("cold", "warm", "append"), ("computed", "local", "read"), ("append", "limit")])
def test_what_a_chart_tells_apart_looks_different_to_everybody(name: str, vision: str, group: tuple[str, ...]) -> None:
    colours = theme(name)
    for one, other in combinations(group, 2):
        a, b = seen(colours[one], vision), seen(colours[other], vision)
        assert sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5 > 20, (one, other)


def test_both_ways_to_the_dark_theme_lead_to_the_same_colours() -> None:
    media = _STYLE[_STYLE.index("@media") : _STYLE.index(':root[data-theme="dark"]')]
    dark = _STYLE[_STYLE.index(':root[data-theme="dark"]') :]
    declared = re.findall(r"--[a-z-]+: #[0-9a-f]+;", dark)
    assert declared
    assert all(one in media for one in declared)
