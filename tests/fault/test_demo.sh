#!/usr/bin/env bash
# The demo must notice: with the module, the boxes or the network taken away it exits non-zero and names the step.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
failures=0
for what in module box network; do
  log=$(mktemp "${TMPDIR:-/tmp}/dxpu-fault-demo.XXXXXX")
  status=0
  DXPU_DEMO_WITHOUT=$what timeout -k 30 280 "$root/demo" >"$log" 2>&1 </dev/null || status=$?
  verdict=$(tail -n 1 "$log")
  # 124: it hung. Step 3 is the first that needs what was taken; that steps 1 and 2 went well shows that it was there.
  if [ $status -ne 0 ] && [ $status -ne 124 ] && grep -q '^demo: FAILED in step 3: ' <<<"$verdict"; then
    echo "PASS without $what: exit $status, $verdict"
    state=$(sed -n 's/.*(logs: \(.*\))$/\1/p' <<<"$verdict")
    case $state in */dxpu-demo.*) rm -rf "$state" ;; esac
    rm -f "$log"
  else
    echo "FAIL without $what: exit $status, expected a failure in step 3, got: $verdict (log: $log)"
    tail -n 25 "$log" | sed 's/^/  | /'
    failures=$((failures + 1))
  fi
done
[ $failures -eq 0 ]
