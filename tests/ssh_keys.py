"""Keys as ssh-keygen writes them."""

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519


def make(folder, name, key=None):
    """NAME and NAME.pub in a folder, as `ssh-keygen -N '' -f NAME`; the path of NAME. key: None: a
    new one of ed25519."""
    key = key or ed25519.Ed25519PrivateKey.generate()
    ssh, own = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    (folder / name).write_bytes(key.private_bytes(serialization.Encoding.PEM, ssh, own))
    (folder / name).chmod(0o600)
    open_ssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public = key.public_key().public_bytes(*open_ssh) + b" someone@somewhere\n"
    (folder / f"{name}.pub").write_bytes(public)
    return str(folder / name)
