# Sourced by the commands beside it: builds the project's environment where it is missing, and sets environment_python.
# EAGLE3_FLOWS=flows-cuda takes the environment with CUDA's torch (training on GPUs) in place of the one for CPUs.

checkout="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../.." && pwd -P)"
export PYTHONPATH="$checkout"
unset PYTHONHOME

# A name on PATH is not yet a Python that runs (version managers leave stubs), nor one that can make environments.
bare_python=""
for candidate in python3.11 python3.12 python3; do
  bare_python="$("$candidate" -c '
import sys
if (3, 11) <= sys.version_info[:2] <= (3, 12):
    import ensurepip, venv
    print(sys.executable)
' 2>/dev/null)" && [[ -n "$bare_python" ]] && break
done
if [[ -z "$bare_python" ]]; then
  echo "error: no Python 3.11 or 3.12 with venv and ensurepip on PATH. To mend it: install one (Debian: python3.11-venv)." >&2
  exit 1
fi

flows="${EAGLE3_FLOWS:-flows}"
environment_python="$("$bare_python" -m infra.environments build "$flows")"
# What is started from here finds the same environment under the plain name.
if [[ "$flows" != flows ]]; then
  export EAGLE3_ENV_FLOWS="${environment_python%/bin/python}"
fi
