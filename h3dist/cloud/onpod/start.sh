#!/usr/bin/env bash
# What our image starts on a pod: an SSH server that lets in the key in PUBLIC_KEY, and nobody else.
set -eu
: "${PUBLIC_KEY:?an SSH public key is needed}"
mkdir -p -m 700 "$HOME/.ssh" /run/sshd
printf '%s\n' "$PUBLIC_KEY" >"$HOME/.ssh/authorized_keys"
chmod 600 "$HOME/.ssh/authorized_keys"
ssh-keygen -A
# told in the container's log, and no reason not to start: other attention backends do without it
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
    /opt/h3dist/bin/python /opt/h3dist/sage.py || echo "sageattention cannot be used on this machine" >&2
fi
exec /usr/sbin/sshd -D -e -o PasswordAuthentication=no -o PermitRootLogin=prohibit-password
