interlace-profile 2
fingerprint "some machine"
op "aten.mm(f32[2048,1024],f32[1024,1024])->f32[2048,1024]" us 45000 bytes 8388608 transient 0 measured
together file_read 1.25 file_write 1.125
together compute 1.0625 file_read 1.5
