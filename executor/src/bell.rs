//! Waiting for something that another thread does: spin briefly, give way for a while, then sleep until the bell rings.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::locked;
use crate::waiting::{SPIN, give_way, spin_for};

/// How long a waiter gives way before it sleeps: longer than one device waits for another within a few layers, since
/// waking a thread takes tens of microseconds, and more on virtual machines.
const AWAKE: Duration = Duration::from_millis(20);
/// How often a sleeper looks without a ring: for flags that are raised without one, as by signal handlers. A twentieth
/// of a second is no delay to a person.
const LOOK: Duration = Duration::from_millis(50);

/// A place to wait at. What is waited for lives elsewhere, in atomics.
#[derive(Default)]
pub(crate) struct Bell {
    sleepers: AtomicU32,
    lock: Mutex<()>,
    rings: Condvar,
}

impl Bell {
    /// Returns once `is_ready` holds. The thread that makes it hold stores with `SeqCst` and then rings.
    pub(crate) fn wait_until(&self, is_ready: impl Fn() -> bool) {
        if is_ready() {
            return;
        }
        if spin_for(SPIN, &is_ready) {
            return;
        }
        give_way(AWAKE, &is_ready);
        self.sleep_until(is_ready);
    }

    /// The same without spinning first, for a waiter that would take a processor from those that it waits for.
    pub(crate) fn sleep_until(&self, is_ready: impl Fn() -> bool) {
        if is_ready() {
            return;
        }
        let mut guard = locked(&self.lock);
        // Sequentially consistent with the store that makes `is_ready` hold: either this thread sees
        // that store, or the ringer sees this sleeper and must take the lock before it notifies.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !is_ready() {
            let waited = self.rings.wait_timeout(guard, LOOK);
            guard = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Makes all waiters look again.
    pub(crate) fn ring(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(locked(&self.lock));
            self.rings.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn no_ring_is_lost() {
        let shared = Arc::new((Bell::default(), AtomicU32::new(0)));
        let other = Arc::clone(&shared);
        let echo = thread::spawn(move || {
            for turn in 0..2000 {
                other.0.wait_until(|| other.1.load(Ordering::SeqCst) == 2 * turn + 1);
                if turn % 100 == 0 {
                    thread::sleep(2 * SPIN);
                }
                other.1.store(2 * turn + 2, Ordering::SeqCst);
                other.0.ring();
            }
        });
        for turn in 0..2000 {
            shared.1.store(2 * turn + 1, Ordering::SeqCst);
            shared.0.ring();
            shared.0.wait_until(|| shared.1.load(Ordering::SeqCst) == 2 * turn + 2);
        }
        echo.join().unwrap();
    }
}
