//! A file layer for SQLite that can lose power.
//!
//! It stands between SQLite and the real file layer and keeps, for each file, every change since the file was last
//! synchronized. A power cut is an image of the files as a disk may show them afterwards: the synchronized content
//! and an arbitrary selection of the later changes, each whole, torn at a sector's edge, or lost. Nothing has to be
//! killed for that: images are taken in the midst of the work, between any two operations on the files, together
//! with what had been acknowledged up to that very moment.
//!
//! It can also refuse to write (a full disk), fail to synchronize (a dying disk) and open files read-only.

#![expect(
    unsafe_code,
    reason = "SQLite's file layer is a C interface; there is no safe one that supports a WAL"
)]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use rusqlite::ffi;
use statehouse_store::Random;

/// What a disk writes whole.
const SECTOR: usize = 512;

/// One change of a file that is not synchronized yet.
enum Change {
    Write { offset: u64, data: Vec<u8> },
    Truncate { length: u64 },
}

/// A file as the disk surely has it, and what came later.
#[derive(Default)]
struct Tracked {
    synchronized: Vec<u8>,
    later: Vec<Change>,
}

/// The files after a power cut, and what had been acknowledged before it.
pub struct Image {
    files: HashMap<PathBuf, Vec<u8>>,
    /// The operations that callers had been told were applied.
    pub acknowledged: Vec<String>,
    /// How many changes were lost or torn.
    pub damaged: usize,
}

impl Image {
    /// Writes the files into a folder. Returns the path of the file with this name there.
    pub fn restore(&self, folder: &Path, name: &str) -> PathBuf {
        for (path, content) in &self.files {
            std::fs::write(folder.join(path.file_name().unwrap()), content).unwrap();
        }
        folder.join(name)
    }
}

struct State {
    random: Random,
    files: HashMap<PathBuf, Tracked>,
    acknowledged: Vec<String>,
    /// Operations on files until the next image is taken.
    until_cut: u64,
    /// Images are taken this often, on average; 0 for never.
    cut_every: u64,
    images: Vec<Image>,
    refuse_writes: bool,
    refuse_synchronization: bool,
    read_only: bool,
}

/// A file layer that was registered with SQLite under a name.
pub struct CrashVfs {
    name: String,
    state: Arc<Mutex<State>>,
}

/// What the C side holds on to: the real layer, and the state.
struct Shared {
    real: *mut ffi::sqlite3_vfs,
    state: Arc<Mutex<State>>,
}

impl CrashVfs {
    /// Registers a file layer. It stays registered as long as the process lives.
    pub fn register(name: &str, seed: u64, cut_every: u64) -> CrashVfs {
        let state = Arc::new(Mutex::new(State {
            random: Random::seeded(seed),
            files: HashMap::new(),
            acknowledged: Vec::new(),
            until_cut: cut_every.max(1),
            cut_every,
            images: Vec::new(),
            refuse_writes: false,
            refuse_synchronization: false,
            read_only: false,
        }));
        // SAFETY: a null name asks for the default layer, which exists as long as the process does.
        let real = unsafe { ffi::sqlite3_vfs_find(std::ptr::null()) };
        assert!(!real.is_null());
        // SAFETY: `real` points to a valid layer, as asserted.
        let base = unsafe { &*real };
        let shared = Box::leak(Box::new(Shared { real, state: state.clone() }));
        let c_name = CString::new(name).unwrap().into_raw();
        let layer = Box::leak(Box::new(ffi::sqlite3_vfs {
            iVersion: 2,
            szOsFile: c_int::try_from(size_of::<ShimFile>()).unwrap() + base.szOsFile,
            mxPathname: base.mxPathname,
            pNext: std::ptr::null_mut(),
            zName: c_name,
            pAppData: std::ptr::from_mut(shared).cast::<c_void>(),
            xOpen: Some(open),
            xDelete: Some(delete),
            xAccess: Some(access),
            xFullPathname: Some(full_pathname),
            xDlOpen: None,
            xDlError: None,
            xDlSym: None,
            xDlClose: None,
            xRandomness: Some(randomness),
            xSleep: Some(sleep),
            xCurrentTime: Some(current_time),
            xGetLastError: None,
            xCurrentTimeInt64: Some(current_time_int64),
            xSetSystemCall: None,
            xGetSystemCall: None,
            xNextSystemCall: None,
        }));
        // SAFETY: `layer` is valid and lives as long as the process.
        assert_eq!(unsafe { ffi::sqlite3_vfs_register(layer, 0) }, ffi::SQLITE_OK);
        CrashVfs { name: name.to_owned(), state }
    }

    pub fn name(&self) -> String {
        self.name.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Notes that a caller was told that its operation was applied.
    pub fn acknowledge(&self, operation: &str) {
        self.lock().acknowledged.push(operation.to_owned());
    }

    /// The images so far.
    pub fn take_images(&self) -> Vec<Image> {
        std::mem::take(&mut self.lock().images)
    }

    /// Takes an image now.
    pub fn cut(&self) -> Image {
        self.lock().image()
    }

    /// From now on every write fails as on a full disk, or succeeds again.
    pub fn refuse_writes(&self, refuse: bool) {
        self.lock().refuse_writes = refuse;
    }

    /// From now on every synchronization fails.
    pub fn refuse_synchronization(&self, refuse: bool) {
        self.lock().refuse_synchronization = refuse;
    }

    /// From now on files can be opened for reading only.
    pub fn read_only(&self, read_only: bool) {
        self.lock().read_only = read_only;
    }
}

impl State {
    /// Called before every change of a file.
    fn tick(&mut self) {
        if self.cut_every == 0 {
            return;
        }
        self.until_cut -= 1;
        if self.until_cut == 0 {
            self.until_cut = 1 + self.random.below(2 * self.cut_every);
            let image = self.image();
            self.images.push(image);
        }
    }

    fn image(&mut self) -> Image {
        let mut damaged = 0;
        // Now and then everything is lost, or nothing; in between each change has its own luck.
        let survival = [0.0, 0.5, 0.9, 1.0][self.random.below(4) as usize];
        let random = &mut self.random;
        let files = self.files.iter().map(|(path, tracked)| {
            let mut content = tracked.synchronized.clone();
            for change in &tracked.later {
                match change {
                    Change::Write { offset, data } if random.chance(survival) => {
                        write_at(&mut content, *offset, data);
                    }
                    Change::Write { offset, data } => {
                        damaged += 1;
                        if random.chance(0.3) {
                            let sectors = random.below((data.len() / SECTOR + 1) as u64) as usize;
                            write_at(&mut content, *offset, &data[..(sectors * SECTOR).min(data.len())]);
                        }
                    }
                    Change::Truncate { length } if random.chance(survival) => {
                        content.truncate(*length as usize);
                    }
                    Change::Truncate { .. } => damaged += 1,
                }
            }
            (path.clone(), content)
        });
        let files = files.collect();
        Image { files, acknowledged: self.acknowledged.clone(), damaged }
    }
}

fn write_at(content: &mut Vec<u8>, offset: u64, data: &[u8]) {
    let (from, to) = (offset as usize, offset as usize + data.len());
    if data.is_empty() {
        return;
    }
    if content.len() < to {
        content.resize(to, 0);
    }
    content[from..to].copy_from_slice(data);
}

/// SQLite's idea of an open file. The real layer's own idea of it follows in memory.
#[repr(C)]
struct ShimFile {
    methods: *const ffi::sqlite3_io_methods,
    shared: *const Shared,
    /// Leaked, or null for a file without a name, which is temporary and not tracked.
    path: *const PathBuf,
}

/// The shim's own part of a file.
///
/// SAFETY: `file` was filled by [`open`] of this layer.
unsafe fn shim<'a>(file: *mut ffi::sqlite3_file) -> &'a ShimFile {
    unsafe { &*file.cast::<ShimFile>() }
}

/// The real layer's part of a file.
///
/// SAFETY: `file` has `szOsFile` bytes, of which the first are a `ShimFile`.
unsafe fn real(file: *mut ffi::sqlite3_file) -> *mut ffi::sqlite3_file {
    unsafe { file.cast::<u8>().add(size_of::<ShimFile>()).cast() }
}

/// Calls a method of the real layer's file.
macro_rules! forward {
    ($file:ident . $method:ident ( $($argument:expr),* )) => {{
        // SAFETY: the real layer filled in its methods when it opened the file.
        unsafe {
            let file = real($file);
            match (*(*file).pMethods).$method {
                Some(method) => method(file, $($argument),*),
                None => ffi::SQLITE_NOTFOUND,
            }
        }
    }};
}

/// Calls a method of the real layer.
macro_rules! forward_layer {
    ($layer:ident . $method:ident ( $($argument:expr),* )) => {{
        // SAFETY: `pAppData` was set by `register` and lives as long as the process.
        unsafe {
            let real = (*(*$layer).pAppData.cast::<Shared>()).real;
            match (*real).$method {
                Some(method) => method(real, $($argument),*),
                None => ffi::SQLITE_NOTFOUND,
            }
        }
    }};
}

static METHODS: ffi::sqlite3_io_methods = ffi::sqlite3_io_methods {
    // Version 2 has shared memory, which a WAL needs, and no memory mapping, which would bypass this layer.
    iVersion: 2,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(synchronize),
    xFileSize: Some(file_size),
    xLock: Some(lock),
    xUnlock: Some(unlock),
    xCheckReservedLock: Some(check_reserved_lock),
    xFileControl: Some(file_control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(device_characteristics),
    xShmMap: Some(shm_map),
    xShmLock: Some(shm_lock),
    xShmBarrier: Some(shm_barrier),
    xShmUnmap: Some(shm_unmap),
    xFetch: None,
    xUnfetch: None,
};

unsafe extern "C" fn open(
    layer: *mut ffi::sqlite3_vfs,
    name: *const c_char,
    file: *mut ffi::sqlite3_file,
    mut flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    // SAFETY: as in `forward_layer`.
    let shared = unsafe { &*(*layer).pAppData.cast::<Shared>() };
    let mut state = shared.state.lock().unwrap();
    if state.read_only {
        flags &= !(ffi::SQLITE_OPEN_READWRITE | ffi::SQLITE_OPEN_CREATE);
        flags |= ffi::SQLITE_OPEN_READONLY;
    }
    let path = (!name.is_null()).then(|| {
        // SAFETY: SQLite gives a C string where it is not null.
        PathBuf::from(unsafe { CStr::from_ptr(name) }.to_str().unwrap())
    });
    // SAFETY: `file` has room for a `ShimFile` and the real layer's file, as `szOsFile` says.
    let code = unsafe {
        file.cast::<ShimFile>().write(ShimFile {
            methods: std::ptr::null(),
            shared: std::ptr::from_ref(shared),
            path: path.as_ref().map_or(std::ptr::null(), |path| Box::leak(Box::new(path.clone()))),
        });
        let Some(method) = (*shared.real).xOpen else { return ffi::SQLITE_CANTOPEN };
        method(shared.real, name, real(file), flags, out_flags)
    };
    if code == ffi::SQLITE_OK {
        // SAFETY: `file` was written above.
        unsafe { (*file.cast::<ShimFile>()).methods = &raw const METHODS };
        if let Some(path) = path {
            // What was there before this process is taken for synchronized.
            let content = std::fs::read(&path).unwrap_or_default();
            state.files.entry(path).or_insert(Tracked { synchronized: content, later: Vec::new() });
        }
    }
    code
}

/// The tracked changes of a file, unless it is temporary.
fn tracked<'a>(state: &'a mut State, shim: &ShimFile) -> Option<&'a mut Tracked> {
    if shim.path.is_null() {
        return None;
    }
    // SAFETY: the path was leaked by `open`.
    state.files.get_mut(unsafe { &*shim.path })
}

unsafe extern "C" fn write(
    file: *mut ffi::sqlite3_file,
    data: *const c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    // SAFETY: see `shim`; `shared` lives as long as the process.
    let (shim, shared) = unsafe { (shim(file), &*shim(file).shared) };
    let mut state = shared.state.lock().unwrap();
    state.tick();
    if state.refuse_writes {
        return ffi::SQLITE_FULL;
    }
    let code = forward!(file.xWrite(data, length, offset));
    if code == ffi::SQLITE_OK
        && let Some(tracked) = tracked(&mut state, shim)
    {
        // SAFETY: SQLite gives `length` readable bytes.
        let data = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length as usize) }.to_vec();
        tracked.later.push(Change::Write { offset: offset as u64, data });
    }
    code
}

unsafe extern "C" fn truncate(file: *mut ffi::sqlite3_file, length: i64) -> c_int {
    // SAFETY: see `write`.
    let (shim, shared) = unsafe { (shim(file), &*shim(file).shared) };
    let mut state = shared.state.lock().unwrap();
    state.tick();
    let code = forward!(file.xTruncate(length));
    if code == ffi::SQLITE_OK
        && let Some(tracked) = tracked(&mut state, shim)
    {
        tracked.later.push(Change::Truncate { length: length as u64 });
    }
    code
}

unsafe extern "C" fn synchronize(file: *mut ffi::sqlite3_file, _flags: c_int) -> c_int {
    // SAFETY: see `write`.
    let (shim, shared) = unsafe { (shim(file), &*shim(file).shared) };
    let mut state = shared.state.lock().unwrap();
    state.tick();
    if state.refuse_synchronization {
        return ffi::SQLITE_IOERR_FSYNC;
    }
    // The real disk is not asked: what survives is decided here.
    if let Some(tracked) = tracked(&mut state, shim) {
        for change in std::mem::take(&mut tracked.later) {
            match change {
                Change::Write { offset, data } => write_at(&mut tracked.synchronized, offset, &data),
                Change::Truncate { length } => tracked.synchronized.truncate(length as usize),
            }
        }
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn delete(layer: *mut ffi::sqlite3_vfs, name: *const c_char, folder: c_int) -> c_int {
    // SAFETY: as in `open`.
    let (shared, path) =
        unsafe { (&*(*layer).pAppData.cast::<Shared>(), CStr::from_ptr(name).to_str().unwrap()) };
    shared.state.lock().unwrap().files.remove(Path::new(path));
    forward_layer!(layer.xDelete(name, folder))
}

unsafe extern "C" fn close(file: *mut ffi::sqlite3_file) -> c_int {
    forward!(file.xClose())
}
unsafe extern "C" fn read(
    file: *mut ffi::sqlite3_file,
    to: *mut c_void,
    length: c_int,
    offset: i64,
) -> c_int {
    forward!(file.xRead(to, length, offset))
}
unsafe extern "C" fn file_size(file: *mut ffi::sqlite3_file, size: *mut i64) -> c_int {
    forward!(file.xFileSize(size))
}
unsafe extern "C" fn lock(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    forward!(file.xLock(level))
}
unsafe extern "C" fn unlock(file: *mut ffi::sqlite3_file, level: c_int) -> c_int {
    forward!(file.xUnlock(level))
}
unsafe extern "C" fn check_reserved_lock(file: *mut ffi::sqlite3_file, result: *mut c_int) -> c_int {
    forward!(file.xCheckReservedLock(result))
}
unsafe extern "C" fn file_control(file: *mut ffi::sqlite3_file, code: c_int, argument: *mut c_void) -> c_int {
    forward!(file.xFileControl(code, argument))
}
unsafe extern "C" fn sector_size(_file: *mut ffi::sqlite3_file) -> c_int {
    SECTOR as c_int
}
unsafe extern "C" fn device_characteristics(_file: *mut ffi::sqlite3_file) -> c_int {
    // A torn write leaves the bytes around it alone; nothing else is promised.
    ffi::SQLITE_IOCAP_POWERSAFE_OVERWRITE
}
unsafe extern "C" fn shm_map(
    file: *mut ffi::sqlite3_file,
    page: c_int,
    size: c_int,
    extend: c_int,
    at: *mut *mut c_void,
) -> c_int {
    forward!(file.xShmMap(page, size, extend, at))
}
unsafe extern "C" fn shm_lock(
    file: *mut ffi::sqlite3_file,
    offset: c_int,
    count: c_int,
    flags: c_int,
) -> c_int {
    forward!(file.xShmLock(offset, count, flags))
}
unsafe extern "C" fn shm_barrier(file: *mut ffi::sqlite3_file) {
    // SAFETY: as in `forward`.
    unsafe {
        let file = real(file);
        if let Some(method) = (*(*file).pMethods).xShmBarrier {
            method(file);
        }
    }
}
unsafe extern "C" fn shm_unmap(file: *mut ffi::sqlite3_file, remove: c_int) -> c_int {
    forward!(file.xShmUnmap(remove))
}
unsafe extern "C" fn access(
    layer: *mut ffi::sqlite3_vfs,
    name: *const c_char,
    flags: c_int,
    result: *mut c_int,
) -> c_int {
    forward_layer!(layer.xAccess(name, flags, result))
}
unsafe extern "C" fn full_pathname(
    layer: *mut ffi::sqlite3_vfs,
    name: *const c_char,
    length: c_int,
    to: *mut c_char,
) -> c_int {
    forward_layer!(layer.xFullPathname(name, length, to))
}
unsafe extern "C" fn randomness(layer: *mut ffi::sqlite3_vfs, length: c_int, to: *mut c_char) -> c_int {
    forward_layer!(layer.xRandomness(length, to))
}
unsafe extern "C" fn sleep(layer: *mut ffi::sqlite3_vfs, micros: c_int) -> c_int {
    forward_layer!(layer.xSleep(micros))
}
unsafe extern "C" fn current_time(layer: *mut ffi::sqlite3_vfs, time: *mut f64) -> c_int {
    forward_layer!(layer.xCurrentTime(time))
}
unsafe extern "C" fn current_time_int64(layer: *mut ffi::sqlite3_vfs, time: *mut i64) -> c_int {
    forward_layer!(layer.xCurrentTimeInt64(time))
}
