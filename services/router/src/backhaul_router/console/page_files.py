"""The page's files, with what browsers are told about them."""

from dataclasses import dataclass
from importlib import resources

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""Of every answer. Nothing is loaded from elsewhere, nothing is framed, and no text ever becomes markup."""

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file."""

    content_type: str
    body: bytes


def page_files() -> dict[str, PageFile]:
    """Reads them all, by name; the page itself is also what an empty name stands for."""
    folder = resources.files("backhaul_router.console") / "page"
    found = {entry.name: entry for entry in folder.iterdir() if entry.name.rpartition(".")[2] in _TYPES}
    files = {name: PageFile(_TYPES[name.rpartition(".")[2]], entry.read_bytes()) for name, entry in found.items()}
    return files | {"": files["index.html"]}
