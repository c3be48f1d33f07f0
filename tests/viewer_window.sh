#!/bin/sh
# A real window under a virtual display: it starts, opens the plan given as argument, and closes cleanly.
# usage: tests/viewer_window.sh path/to/hybrid-viewer plan.ron [trace.ron]
set -eu

viewer=$1
shift

skip() {
    echo "skipped: $1"
    exit 0
}

for program in Xvfb xdotool; do
    command -v "$program" >/dev/null || skip "there is no $program"
done

folder=$(mktemp -d)
# Without -noreset the server begins anew when its only client leaves, and turns away who comes meanwhile.
Xvfb -noreset -displayfd 3 -screen 0 1280x800x24 3>"$folder/display" 2>"$folder/xvfb.log" &
xvfb=$!
window=""
trap 'kill $xvfb $window 2>/dev/null || true; rm -rf "$folder"' EXIT
for _ in $(seq 200); do
    [ "$(wc -l <"$folder/display")" -gt 0 ] && break
    kill -0 $xvfb 2>/dev/null || break
    sleep 0.1
done
[ -s "$folder/display" ] || skip "Xvfb does not start: $(tail -1 "$folder/xvfb.log")"
DISPLAY=:$(cat "$folder/display")
export DISPLAY
unset WAYLAND_DISPLAY
# A server that has told its number may still turn the first ones away.
for _ in $(seq 50); do
    xdotool getdisplaygeometry >/dev/null 2>&1 && break
    sleep 0.1
done

XDG_STATE_HOME="$folder" LIBGL_ALWAYS_SOFTWARE=1 "$viewer" "$@" 2>"$folder/viewer.log" &
window=$!
title=$(basename "$1")
found=""
for _ in $(seq 150); do
    if ! kill -0 $window 2>/dev/null; then
        echo "the viewer ended by itself:"
        cat "$folder/viewer.log"
        exit 1
    fi
    found=$(xdotool search --name "^$title" 2>/dev/null | head -1) && [ -n "$found" ] && break
    sleep 0.2
done
if [ -z "$found" ]; then
    echo "no window is called $title after 30 s"
    cat "$folder/viewer.log"
    exit 1
fi

if ! timeout 20 xdotool windowfocus --sync "$found" key ctrl+q; then
    echo "the window did not take the focus within 20 s"
    cat "$folder/viewer.log"
    exit 1
fi
for _ in $(seq 50); do
    if ! kill -0 $window 2>/dev/null; then
        status=0
        wait $window || status=$?
        window=""
        [ $status = 0 ] || { echo "the viewer ended with $status"; cat "$folder/viewer.log"; exit 1; }
        echo "a window opened $title and closed cleanly"
        exit 0
    fi
    sleep 0.2
done
echo "the viewer did not close within 10 s"
exit 1
