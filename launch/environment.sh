#!/usr/bin/env bash
# launch/environment.sh VENV EXTRA [PYTHON]: makes the virtual environment VENV with this package, which the Makefile uses.
# EXTRA is "" or "dev". Without PYTHON a fitting environment stays as it is, and a new one takes the first fitting Python.
# An environment of another Python than the one that is asked for, or of one too old or gone, is made anew.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 extra=$2 asked=${3:-}

say() { echo "$*" >&2; }
fail() { say "error: $*"; exit 1; }
# The version of a Python, such as 3.11; nothing if it does not run.
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
fits() { # a version such as 3.11
  [[ $1 =~ ^([0-9]+)\.([0-9]+)$ ]] && ((BASH_REMATCH[1] > 3 || (BASH_REMATCH[1] == 3 && BASH_REMATCH[2] >= 11)))
}

there=$(version_of "$venv/bin/python")
if [ -n "$asked" ]; then
  wanted=$(version_of "$asked")
  [ -n "$wanted" ] || fail "$asked is no Python that runs; give another one: make demo PYTHON=python3.11"
  fits "$wanted" || fail "$asked is Python $wanted, and 3.11 or later is needed: make demo PYTHON=python3.11"
elif fits "$there"; then
  wanted=$there asked=$venv/bin/python
else
  for asked in python3 python3.13 python3.12 python3.11 ""; do
    wanted=${asked:+$(version_of "$asked")}
    if fits "$wanted"; then break; fi
  done
  [ -n "$asked" ] || fail "Python 3.11 or later is needed, and python3 is $(python3 --version 2>&1 | head -1); install it" \
    "(Debian, Ubuntu: apt-get install python3.11-venv), then make demo PYTHON=python3.11"
fi

if [ -e "$venv" ] && [ "$there" != "$wanted" ]; then
  [ -e "$venv/pyvenv.cfg" ] || fail "$venv is no virtual environment; give another folder: make demo VENV=FOLDER"
  [ -n "$there" ] && owner="Python $there" || owner="a Python that does not run"
  say "$venv belongs to $owner, not to Python $wanted: it is made anew"
  rm -rf "$venv"
fi
stamp=$venv/.installed${extra:+-$extra}
if [ -e "$stamp" ] && [ ! pyproject.toml -nt "$stamp" ]; then exit 0; fi

"$asked" -c 'import ensurepip, venv' 2>/dev/null ||
  fail "Python $wanted has no venv; install it (Debian, Ubuntu: apt-get install python$wanted-venv)"
say "installing lm_pcfg${extra:+ with its $extra extra} into $venv with Python $wanted: about 3 minutes, and 2 GB without a GPU"
[ -x "$venv/bin/pip" ] || "$asked" -m venv "$venv"

# pip says what it downloads, and nothing while it unpacks: that is counted.
count() {
  local began=$SECONDS
  while sleep 10 >/dev/null 2>&1; do # it outlives this script, and must not hold its output open
    packages=$(find "$venv"/lib/*/site-packages -maxdepth 1 -name '*.dist-info' 2>/dev/null | wc -l)
    say "  ... $packages packages are in place after $((SECONDS - began)) s"
  done
}
count &
counter=$!
trap 'kill "$counter" 2>/dev/null' EXIT
"$venv/bin/pip" install --disable-pip-version-check --progress-bar off --editable ".${extra:+[$extra]}" |
  sed -u -n -e 's/^Collecting \([^ (]*\).*/  \1/p' -e 's/^Installing collected packages.*/  unpacking/p' >&2 ||
  fail "the installation failed; if pip could not reach its index, try again: what was downloaded is kept"
touch "$venv/.installed" "$stamp"
say "installed in $((SECONDS / 60)):$(printf %02d $((SECONDS % 60))) minutes"
