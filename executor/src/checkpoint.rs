//! The checkpoint's files, mapped while weights are read from them.

#![expect(unsafe_code, reason = "files are read through memory maps")]

use std::fs::{self, File};
use std::io::ErrorKind;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use half::{bf16, f16};
use ir::id::{FileId, Table};
use ir::model::CheckpointFile;
use ir::plan::Weight;
use ir::tensor::DType;
use ir::weight::{Source, Stride};
use memmap2::{Mmap, UncheckedAdvice};

/// How much of a matrix is read before its pages are given back. Each time all threads lose translations, which takes
/// 20 to 90 µs on virtual machines: for every 128 KiB it made loading a third slower.
const FORGOTTEN_BYTES: usize = 8 << 20;

/// A matrix or vector as a checkpoint has it.
#[derive(Clone, Debug)]
pub(crate) enum Stored {
    /// A view of one or two axes.
    Whole(Source),
    /// A view of each row.
    Rows(Vec<Source>),
}

/// Every file of a checkpoint, mapped.
pub(crate) struct Checkpoint {
    maps: Table<FileId, Mmap>,
}

impl Checkpoint {
    /// Maps the files of a plan that lies in `folder`.
    ///
    /// # Errors
    /// When a file is missing, or is not what it was when the plan was made.
    pub(crate) fn open(files: &Table<FileId, CheckpointFile>, folder: &Path) -> Result<Self> {
        let maps = files.rows().iter().map(|file| map(file, folder)).collect::<Result<_>>()?;
        Ok(Self { maps })
    }

    /// Elements of rows `rows`, as f32, row-major. A weight is read once, by threads that take its rows in order: every
    /// few megabytes the pages of rows in front are given back, but for transposed matrices and rows that lie apart.
    ///
    /// # Errors
    /// When there are no such rows, or they lie beyond the end of the file.
    pub(crate) fn read(&self, stored: &Stored, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        match stored {
            Stored::Whole(source) => self.read_view(source, rows, out),
            Stored::Rows(sources) => {
                let sources =
                    sources.get(rows.clone()).with_context(|| format!("rows {rows:?}"))?;
                let columns = out.len() / sources.len().max(1);
                let out = out.chunks_exact_mut(columns.max(1));
                sources.iter().zip(out).try_for_each(|(row, out)| self.read_view(row, 0..1, out))
            }
        }
    }

    /// Elements of rows `rows` of a view of two axes, as f32, row-major.
    fn read_view(&self, source: &Source, rows: Range<usize>, out: &mut [f32]) -> Result<()> {
        let view = View::of(source)?;
        ensure!(rows.end <= view.rows && out.len() == rows.len() * view.columns, "rows {rows:?}");
        let map = self.contents(source)?;
        self.fault_in(source, &view, &rows);
        match source.dtype {
            DType::F32 => view.read(map, &rows, out, |bytes: [u8; 4]| f32::from_le_bytes(bytes)),
            DType::F16 => view.read(map, &rows, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
            DType::Bf16 => view.read(map, &rows, out, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            DType::I32 | DType::U8 | DType::I8 => bail!("a weight is stored as integers"),
        }
        if view.column_stride() == Some(1) {
            self.forget_up_to(source, &view, &rows);
        }
        Ok(())
    }

    /// The bytes of rows that lie one after another in the file; `None` where they do not.
    pub(crate) fn rows(&self, stored: &Stored, rows: &Range<usize>) -> Option<&[u8]> {
        let Stored::Whole(source) = stored else { return None };
        let view = View::of(source).ok()?;
        let is_dense = view.column_stride() == Some(1)
            && matches!(view.row_axis, [stride] if stride.stride as usize == view.columns);
        if !is_dense || rows.end > view.rows {
            return None;
        }
        self.fault_in(source, &view, rows);
        let row_bytes = view.columns * source.dtype.bytes() as usize;
        self.contents(source).ok()?.get(rows.start * row_bytes..rows.end * row_bytes)
    }

    /// Maps the pages of neighbouring rows in one call instead of one fault each.
    fn fault_in(&self, source: &Source, view: &View<'_>, rows: &Range<usize>) {
        if rows.is_empty() || view.column_stride() != Some(1) || view.row_axis.len() > 1 {
            return;
        }
        #[cfg(target_os = "linux")]
        if let Some(map) = self.maps.get(source.file) {
            let bytes = view.bytes(source, rows);
            // An older system refuses, and then pages are mapped as they are touched.
            drop(map.advise_range(memmap2::Advice::PopulateRead, bytes.start, bytes.len()));
        }
    }

    /// Gives back the pages of the rows up to `rows`, if these complete another few megabytes. A thread that still
    /// reads there faults its pages in again, and they stay until the next time. Hence each range is given back twice.
    fn forget_up_to(&self, source: &Source, view: &View<'_>, rows: &Range<usize>) {
        let row_bytes = view.columns * source.dtype.bytes() as usize;
        let step = FORGOTTEN_BYTES.div_ceil(row_bytes.max(1));
        if rows.start / step != rows.end / step {
            let first = rows.start.min(rows.end.saturating_sub(2 * step));
            self.forget_bytes(source, view.bytes(source, &(first..rows.end)));
        }
    }

    /// Gives all pages of a matrix back.
    pub(crate) fn forget(&self, stored: &Stored) {
        for source in stored.sources() {
            let (start, end) = source.span();
            self.forget_bytes(source, start as usize..end as usize);
        }
    }

    fn forget_bytes(&self, source: &Source, bytes: Range<usize>) {
        if let Some(map) = self.maps.get(source.file) {
            give_back(map, bytes);
        }
    }

    /// Checks that all of a matrix of `rows` rows and `columns` columns is there.
    ///
    /// # Errors
    /// When it has another shape, or lies beyond the end of a file.
    pub(crate) fn check(&self, stored: &Stored, rows: usize, columns: usize) -> Result<()> {
        let shape = stored.shape();
        ensure!(shape == [rows as u32, columns as u32], "its source has shape {shape:?}");
        stored.sources().iter().try_for_each(|source| self.contents(source).map(drop))
    }

    /// The bytes of the file from the view's first to its last.
    ///
    /// # Errors
    /// When they lie beyond the end of the file.
    fn contents(&self, source: &Source) -> Result<&[u8]> {
        let map = self.maps.get(source.file).context("a weight names a file that is not there")?;
        let (start, end) = source.span();
        map.get(start as usize..end as usize).context("a weight lies beyond the end of its file")
    }
}

impl Stored {
    fn sources(&self) -> &[Source] {
        match self {
            Stored::Whole(source) => std::slice::from_ref(source),
            Stored::Rows(sources) => sources,
        }
    }

    fn shape(&self) -> Vec<u32> {
        match self {
            Stored::Whole(source) => source.shape(),
            Stored::Rows(sources) => {
                let row = sources.first().map(Source::shape).unwrap_or_default();
                [&[sources.len() as u32], row.as_slice()].concat()
            }
        }
    }
}

/// The matrices of a weight as a checkpoint has them: one, or one for each expert of a stack.
pub(crate) fn matrices(weight: &Weight) -> Result<Vec<Stored>> {
    let axes = weight.shape.len();
    let source = weight.sources.first().context("it has no source")?;
    if axes < 3 {
        let is_whole = source.axes.len() == axes;
        let rows = || Stored::Rows(weight.sources.clone());
        return Ok(vec![if is_whole { Stored::Whole(source.clone()) } else { rows() }]);
    }
    if source.axes.len() < axes {
        return Ok(weight.sources.iter().cloned().map(Stored::Whole).collect());
    }
    let matrix = |start| Ok(Stored::Whole(source.part(start)?));
    (0..weight.shape[0]).map(matrix).collect()
}

fn map(file: &CheckpointFile, folder: &Path) -> Result<Mmap> {
    let path = folder.join(&file.path);
    let name = path.display();
    let opening = || format!("opening checkpoint file {name}");
    let found = fs::metadata(&path).map_err(|error| {
        if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) {
            anyhow!("the checkpoint's file {name} is gone; --model FOLDER names where it lies now")
        } else {
            anyhow!(error).context(opening())
        }
    })?;
    // To open a pipe would wait for whoever writes to it.
    ensure!(found.is_file(), "{name} is no file");
    let opened = File::open(&path).with_context(opening)?;
    let bytes = opened.metadata().with_context(|| format!("reading the size of {name}"))?.len();
    ensure!(
        bytes == file.bytes,
        "checkpoint changed since it was compiled: {name} has {bytes} bytes, the plan expects {}: \
         compile it again",
        file.bytes
    );
    // SAFETY: the map is read only; a file that is changed meanwhile gives other numbers, nothing worse,
    // and one that is cut short ends the process.
    let map = unsafe { Mmap::map(&opened) }.with_context(|| format!("mapping {name}"))?;
    ensure!(
        ir::fingerprint(&map) == file.fingerprint,
        "checkpoint changed since it was compiled: {name} has other contents than the plan expects: \
         compile it again"
    );
    give_back(&map, 0..map.len());
    Ok(map)
}

/// Takes the pages of some bytes out of memory.
fn give_back(map: &Mmap, bytes: Range<usize>) {
    let end = bytes.end.min(map.len());
    let start = bytes.start.min(end);
    // SAFETY: the map is of a file and read only: its pages come back from there on the next access.
    let advised =
        unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
    // It only saves memory; where the system refuses, nothing is lost.
    drop(advised);
}

/// A source of one or two axes, seen as rows of columns.
struct View<'a> {
    rows: usize,
    columns: usize,
    row_axis: &'a [Stride],
    column_axis: &'a [Stride],
}

impl<'a> View<'a> {
    fn of(source: &'a Source) -> Result<Self> {
        let (row_axis, column_axis): (&[Stride], &[Stride]) = match source.axes.as_slice() {
            [columns] => (&[], columns),
            [rows, columns] => (rows, columns),
            axes => bail!("a view of {} axes is read as a matrix", axes.len()),
        };
        let size = |axis: &[Stride]| axis.iter().map(|stride| stride.size as usize).product();
        Ok(Self { rows: size(row_axis), columns: size(column_axis), row_axis, column_axis })
    }

    /// The distance of neighbouring columns, where it is the same for all.
    fn column_stride(&self) -> Option<usize> {
        if let [stride] = self.column_axis { Some(stride.stride as usize) } else { None }
    }

    fn row_offset(&self, row: usize) -> usize {
        offset(self.row_axis, row)
    }

    /// Where some rows lie in the file, from the first row's first column to the last row's last one.
    fn bytes(&self, source: &Source, rows: &Range<usize>) -> Range<usize> {
        let at = |element: usize| source.offset as usize + element * source.dtype.bytes() as usize;
        at(self.row_offset(rows.start))..at(self.row_offset(rows.end - 1) + self.columns)
    }

    fn read<const N: usize>(
        &self,
        bytes: &[u8],
        rows: &Range<usize>,
        out: &mut [f32],
        decode: impl Fn([u8; N]) -> f32,
    ) {
        let (elements, _) = bytes.as_chunks::<N>();
        let first = rows.start;
        if self.column_stride() == Some(1) {
            for (row, out) in rows.clone().zip(out.chunks_exact_mut(self.columns)) {
                let start = self.row_offset(row);
                for (out, element) in out.iter_mut().zip(&elements[start..start + self.columns]) {
                    *out = decode(*element);
                }
            }
            return;
        }
        // A transposed matrix: neighbours in memory are neighbours in a column, so columns go outside.
        for column in 0..self.columns {
            let start = offset(self.column_axis, column);
            for row in rows.clone() {
                out[(row - first) * self.columns + column] =
                    decode(elements[start + self.row_offset(row)]);
            }
        }
    }
}

/// Elements from the first of an axis to number `index`; inner strides run fastest.
fn offset(axis: &[Stride], mut index: usize) -> usize {
    let mut offset = 0;
    for stride in axis.iter().rev() {
        offset += index % stride.size as usize * stride.stride as usize;
        index /= stride.size as usize;
    }
    offset
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use ir::id::Id as _;

    use super::*;

    fn checkpoint(contents: &[u8], plan: impl Fn(&mut CheckpointFile)) -> Result<Checkpoint> {
        let mut file = tempfile::NamedTempFile::new()?;
        file.write_all(contents)?;
        let mut entry = CheckpointFile {
            path: file.path().to_path_buf(),
            bytes: contents.len() as u64,
            fingerprint: ir::fingerprint(contents),
        };
        plan(&mut entry);
        Checkpoint::open(&[entry].into_iter().collect(), Path::new("."))
    }

    fn counting() -> Checkpoint {
        let contents: Vec<u8> = (0..24).flat_map(|i| (i as f32).to_le_bytes()).collect();
        checkpoint(&contents, |_| ()).unwrap()
    }

    #[test]
    fn rows_transposes_and_interleaved_axes_are_read() {
        let (file, checkpoint) = (FileId::from_index(0), counting());
        let matrix = Source::contiguous(file, DType::F32, 0, &[4, 6]);
        let mut out = vec![0.0; 12];
        checkpoint.read(&Stored::Whole(matrix.clone()), 1..3, &mut out).unwrap();
        assert_eq!(out, (6..18).map(|i| i as f32).collect::<Vec<_>>());

        let mut out = vec![0.0; 8];
        let transposed = Stored::Whole(matrix.clone().transposed());
        checkpoint.read(&transposed, 1..3, &mut out).unwrap();
        assert_eq!(out, [1.0, 7.0, 13.0, 19.0, 2.0, 8.0, 14.0, 20.0]);

        // Rows 0, 1 of every group of 2 × 3 rows of 2 columns.
        let interleaved = Source {
            axes: vec![
                vec![Stride { size: 2, stride: 12 }, Stride { size: 2, stride: 2 }],
                vec![Stride { size: 2, stride: 1 }],
            ],
            ..matrix.clone()
        };
        let mut out = vec![0.0; 8];
        checkpoint.read(&Stored::Whole(interleaved), 0..4, &mut out).unwrap();
        assert_eq!(out, [0.0, 1.0, 2.0, 3.0, 12.0, 13.0, 14.0, 15.0]);

        let reordered = Stored::Rows([3, 0, 2].map(|row| matrix.part(row).unwrap()).to_vec());
        assert_eq!(reordered.shape(), [3, 6]);
        let mut out = vec![0.0; 12];
        checkpoint.read(&reordered, 1..3, &mut out).unwrap();
        assert_eq!(out[..6], (0..6).map(|i| i as f32).collect::<Vec<_>>());
        assert_eq!(out[6..], (12..18).map(|i| i as f32).collect::<Vec<_>>());
        assert!(checkpoint.read(&reordered, 2..4, &mut out).is_err());
    }

    /// Bytes of a checkpoint's only file that are in this process's memory.
    #[cfg(target_os = "linux")]
    fn resident_bytes(checkpoint: &Checkpoint) -> usize {
        let start = checkpoint.maps.rows()[0].as_ptr().addr();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = maps.lines().skip_while(|line| !line.starts_with(&format!("{start:x}-")));
        let resident = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
        resident.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_has_been_read_does_not_stay() {
        let (rows, columns) = (6144, 1024);
        let contents: Vec<u8> =
            (0..rows * columns).flat_map(|i| (i as f32).to_le_bytes()).collect();
        let checkpoint = checkpoint(&contents, |_| ()).unwrap();
        let file = FileId::from_index(0);
        let matrix = Source::contiguous(file, DType::F32, 0, &[rows as u32, columns as u32]);
        // Two readers, one of them behind the other.
        let stored = Stored::Whole(matrix);
        let mut out = vec![0.0; 32 * columns];
        let mut most = 0;
        for first in (0..rows).step_by(32) {
            for first in [first, first.saturating_sub(32)] {
                checkpoint.read(&stored, first..first + 32, &mut out).unwrap();
                let values = (first * columns..).map(|i| i as f32);
                assert!(out.iter().zip(values).all(|(&read, value)| read == value), "{first}");
            }
            most = most.max(resident_bytes(&checkpoint));
        }
        assert!(contents.len() > 2 * FORGOTTEN_BYTES);
        assert!(most <= FORGOTTEN_BYTES + (1 << 20), "{most} bytes stayed");
        checkpoint.forget(&stored);
        assert_eq!(resident_bytes(&checkpoint), 0);
    }

    #[test]
    fn a_changed_file_is_refused() {
        let message = |result: Result<Checkpoint>| format!("{:#}", result.err().unwrap());
        let size = message(checkpoint(&[1; 16], |file| file.bytes = 17));
        assert!(size.contains("has 16 bytes, the plan expects 17"), "{size}");
        let contents = message(checkpoint(&[1; 16], |file| file.fingerprint ^= 1));
        assert!(contents.contains("changed since it was compiled"), "{contents}");
        let missing = message(checkpoint(&[1; 16], |file| file.path = "no/such/file".into()));
        assert!(missing.contains("no/such/file"), "{missing}");
    }
}
