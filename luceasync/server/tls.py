"""The certificate and the key that the server shows, checked before anything else is done.

Owns what TLS we speak and the words for files that do not do. Knows no connection.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from luceasync.config import ServerConfig
from luceasync.errors import ConfigError

ALPN = ("h2", "http/1.1")
ALLOWED = "a PEM file"


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """TLS 1.2 or newer with the files of `config`, None where it names none. Raises ConfigError."""
    cert, key = config.tls_cert, config.tls_key
    if cert is None or key is None:
        return None
    _refuse_other("--tls-cert", cert, "CERTIFICATE", "a certificate, or a chain of them")
    if "ENCRYPTED" in _refuse_other("--tls-key", key, "PRIVATE KEY", "a private key"):
        raise ConfigError(
            f"--tls-key {key}: the key is encrypted, and nobody would be asked for its password; "
            "allowed: a PEM file with a key that is not (`openssl pkey -in KEY -out PLAIN_KEY`)"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(ALPN)
    try:
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(
                f"--tls-key {key}: the key is not that of the certificate {cert}; "
                "allowed: the key for which the first certificate in that file was made"
            ) from None
        raise ConfigError(
            f"--tls-cert {cert} --tls-key {key}: OpenSSL does not take them "
            f"({error.reason or error}); allowed: PEM files with a certificate and its key"
        ) from None
    return context


def _refuse_other(flag: str, path: Path, what: str, words: str) -> str:
    """The text of `path`, which holds a `what`. Raises ConfigError."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: cannot be read ({error.strerror}); allowed: {ALLOWED} with {words}"
        ) from None
    if "-----BEGIN " not in text or f"{what}-----" not in text:
        raise ConfigError(f"{flag} {path}: holds none; allowed: {ALLOWED} with {words}")
    return text
