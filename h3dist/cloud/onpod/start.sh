#!/usr/bin/env bash
# What our image starts on a pod: an SSH server that lets in the key in PUBLIC_KEY, and nobody else.
set -eu
: "${PUBLIC_KEY:?an SSH public key is needed}"
mkdir -p -m 700 "$HOME/.ssh" /run/sshd
printf '%s\n' "$PUBLIC_KEY" >"$HOME/.ssh/authorized_keys"
chmod 600 "$HOME/.ssh/authorized_keys"
ssh-keygen -A
exec /usr/sbin/sshd -D -e -o PasswordAuthentication=no -o PermitRootLogin=prohibit-password
