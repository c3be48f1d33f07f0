//! The streams that CubeCL queues launches on, and the thread that does it: for what the driver or the vendor's library
//! is asked for between launches.
//!
//! - CubeCL keeps its streams to itself: nothing but the debug text of its server gives them away.
//! - What is asked of the server is done by the thread that makes its launches, in the order in which one thread asked
//!   for both.

#![expect(unsafe_code, reason = "streams are asked about through the driver")]

use std::fmt::{self, Write as _};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyhow::{Context as _, Result, anyhow, bail};
use cubecl::device_handle::DeviceHandle;
use cubecl_runtime::runtime::Runtime;
use cudarc::driver::CudaContext;
use cudarc::driver::sys::{self, CUresult, CUstream, CUstreamCaptureStatus};

use super::device::Gpu;
use super::mail::Place;
use crate::memory::Region;
use crate::pinned::Pinned;

/// What makes the launches of a GPU.
pub(super) type Server = <cubecl::cuda::CudaRuntime as Runtime>::Server;

/// One of a server's streams, which live as long as it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stream {
    address: usize,
}

impl Stream {
    /// As the driver knows it.
    pub(super) fn raw(self) -> CUstream {
        ptr::with_exposed_provenance_mut(self.address)
    }

    /// Whether it has yet to do what was queued on it; never what is being captured.
    ///
    /// # Errors
    /// When the device failed.
    fn is_busy(self) -> Result<bool> {
        let mut capture = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the server's streams live as long as it does, and servers are never ended.
        let told = unsafe { sys::cuStreamIsCapturing(self.raw(), &raw mut capture) };
        told.result().context("cuStreamIsCapturing failed")?;
        // A capture ends when its stream is asked.
        if capture != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE {
            return Ok(false);
        }
        // SAFETY: as above.
        let status = unsafe { sys::cuStreamQuery(self.raw()) };
        if status == CUresult::CUDA_ERROR_NOT_READY {
            return Ok(true);
        }
        status.result().map(|()| false).context("cuStreamQuery failed")
    }
}

/// All streams of a server so far.
///
/// # Errors
/// When its text has no address where one is expected.
pub(super) fn streams(server: &Server) -> Result<Vec<Stream>> {
    let mut streams = Streams::default();
    write!(streams, "{server:?}").context("reading CubeCL's debug text")?;
    Ok(streams.found)
}

impl Gpu {
    /// Those who make its launches.
    pub(super) fn server(&self) -> DeviceHandle<Server> {
        DeviceHandle::new(self.client.service_id().device)
    }

    /// Asks something of the server once all launches made so far are the driver's.
    ///
    /// # Errors
    /// Those of `ask`, and when it panics.
    pub(super) fn ask_server<T: Send>(
        &self,
        ask: impl FnOnce(&mut Server) -> Result<T> + Send,
    ) -> Result<T> {
        let asked = self.server().submit_blocking(ask);
        asked.map_err(|error| anyhow!("asking CubeCL's server: {error:?}"))?
    }

    /// The stream that launches of this thread are queued on: the one that is busy while one of them waits. To be called
    /// while this thread captures nothing.
    ///
    /// # Errors
    /// When the driver has no pinned memory, or CubeCL tells of its streams in another way.
    pub(super) fn own_stream(&self, context: &Arc<CudaContext>) -> Result<Stream> {
        /// Another thread's stream may happen to be busy, but not each time.
        const ROUNDS: u32 = 100;
        let region = Arc::new(Region::new(size_of::<u32>())?);
        let pinned = Pinned::alone(context, &region).context("pinning a flag")?;
        let flag = pinned.flag(0);
        // SAFETY: the flag lies in the region, which is pinned until the launches with it have ended.
        let place = unsafe { Place::new(pinned.address(), 0) };
        let turn = self.allocate(size_of::<u32>())?;
        let mut candidates: Option<Vec<Stream>> = None;
        for round in 1..=ROUNDS {
            self.write(&turn, &round.to_ne_bytes())?;
            self.wait_for_flag(place, &turn);
            let waiting = self.ask_server(|server| {
                let mut waiting = Vec::new();
                for stream in streams(server)? {
                    if stream.is_busy()? {
                        waiting.push(stream);
                    }
                }
                Ok(waiting)
            });
            flag.store(round, Ordering::Release);
            self.check(&[&turn])?;
            let waiting = waiting?;
            let before = candidates.take().unwrap_or_else(|| waiting.clone());
            let left: Vec<Stream> =
                before.into_iter().filter(|stream| waiting.contains(stream)).collect();
            match left[..] {
                [stream] => return Ok(stream),
                [] => break,
                _ => candidates = Some(left),
            }
        }
        bail!("which of its streams CubeCL queues launches on cannot be told")
    }
}

/// Finds streams in a server's debug text.
#[derive(Default)]
struct Streams {
    found: Vec<Stream>,
    /// The end of the text so far, in which a stream may begin.
    end: String,
}

impl Streams {
    /// What stands before a stream's address.
    const MARK: &str = "Stream { sys: 0x";
}

impl fmt::Write for Streams {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.end.push_str(text);
        while let Some(mark) = self.end.find(Self::MARK) {
            let digits = &self.end[mark + Self::MARK.len()..];
            let Some(count) = digits.find(|c: char| !c.is_ascii_hexdigit()) else { return Ok(()) };
            let address = usize::from_str_radix(&digits[..count], 16).map_err(|_| fmt::Error)?;
            self.found.push(Stream { address });
            self.end.drain(..mark + Self::MARK.len() + count);
        }
        let kept = self.end.floor_char_boundary(self.end.len().saturating_sub(Self::MARK.len()));
        self.end.drain(..kept);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::cuda;
    use super::*;

    #[test]
    fn streams_are_found_in_pieces_of_text() {
        let mut streams = Streams::default();
        let text = "Server { é, streams: [None, Some(Stream { sys: 0x7f01, x: 1 }), Stream { sys: 0x20 }] }";
        for piece in text.split_inclusive(|c: char| !c.is_alphanumeric()) {
            streams.write_str(piece).unwrap();
        }
        let found: Vec<usize> = streams.found.iter().map(|stream| stream.address).collect();
        assert_eq!(found, [0x7f01, 0x20]);
    }

    #[test]
    fn threads_find_the_streams_they_launch_on() {
        let Some((gpu, context)) = cuda() else { return };
        let own = gpu.own_stream(&context).unwrap();
        let others = std::thread::scope(|scope| {
            let other = || (gpu.own_stream(&context).unwrap(), gpu.own_stream(&context).unwrap());
            [scope.spawn(other), scope.spawn(other)].map(|thread| thread.join().unwrap())
        });
        assert!(others.iter().all(|(first, again)| first == again), "{others:?}");
        let found = [own, others[0].0, others[1].0];
        assert!(
            found[0] != found[1] && found[0] != found[2] && found[1] != found[2],
            "each thread has a stream of its own: {found:?}"
        );
        assert_eq!(gpu.own_stream(&context).unwrap(), own);
    }
}
